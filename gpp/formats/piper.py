"""Piper's JSON:

    {"nodes": [{"id", "TMPCs": {"1": [{"timePerSample", ...}]}}], "edges": [{"sourceId", ...}], ...}

Edges from one operator with equal bytes are one tensor with several readers. `timePerSample` is both passes together; the
forward pass is the time that recomputation adds to it, or a third. Its `syncTime*` are bytes. The user chooses `maxDevices`,
`bandwidth`, `maxMemoryPerDevice` and `mbsInBatch` (cluster, mini-batch).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, with_config

from gpp.errors import InvalidFile
from gpp.formats.draft import MOST, OPEN, SETTING, Amount, Id, ProfileDraft, ProfileNode, by_id, check_ends, joined
from gpp.graph.op_graph import Variant
from gpp.serialization import from_json

RECOMPUTED = "activation recomp"
"""Piper's word for it; the other way is called `vanilla`."""

PIPER = re.compile(r'"TMPCs"\s*:')
"""What tells Piper's JSON from others."""


@with_config(OPEN)
@dataclass(frozen=True, slots=True, kw_only=True)
class PiperWay:
    """A way to run a node on some devices, in Piper's words: seconds and bytes; `sync...` are bytes by the other node."""

    id: str
    time: Annotated[Amount, Field(alias="timePerSample")]
    params: Annotated[Amount, Field(alias="parameterSize")]
    saved: Annotated[Amount, Field(alias="memoryUsageA")]
    fixed: Annotated[Amount, Field(alias="memoryUsageB")]
    receive: Annotated[dict[str, Amount], Field(alias="syncTimeFw")]
    send: Annotated[dict[str, Amount], Field(alias="syncTimeBw")]


@with_config(OPEN)
@dataclass(frozen=True, slots=True, kw_only=True)
class PiperNode:
    """A node of Piper's JSON."""

    id: Id
    ways: Annotated[dict[str, tuple[PiperWay, ...]], Field(alias="TMPCs")]
    name: str | None = None


@with_config(OPEN)
@dataclass(frozen=True, slots=True, kw_only=True)
class PiperEdge:
    """An edge of Piper's JSON; bytes."""

    source: Annotated[Id, Field(alias="sourceId")]
    target: Annotated[Id, Field(alias="destId")]
    size: Annotated[Amount, Field(alias="communicationCost")]


@with_config(OPEN)
@dataclass(frozen=True, slots=True, kw_only=True)
class PiperProfile:
    """Piper's JSON."""

    nodes: Annotated[tuple[PiperNode, ...], Field(min_length=1)]
    edges: tuple[PiperEdge, ...]


def read_piper(text: str, path: Path, seconds: float) -> ProfileDraft:
    """The profile in Piper's JSON.

    Args:
        seconds: length of one unit of its times.

    Raises:
        InvalidFile: a field is missing or wrong; names the place.
    """
    profile = from_json(PiperProfile, text, path, setting=SETTING)
    known = by_id(profile.nodes, path)
    nodes = {key: _piper_node(node, known, path, f"nodes[{i}]", seconds) for i, (key, node) in enumerate(known.items())}
    sizes: dict[tuple[Id, Id], float] = {}
    for i, edge in enumerate(profile.edges):
        a, b = edge.source, edge.target
        check_ends(a, b, known, path, i)
        if (a, b) in sizes:
            raise InvalidFile(path, f"edges[{i}]", "is given twice", "give each edge once", value=[f"{a} -> {b}"])
        sizes[a, b] = edge.size
    return joined(path, nodes, sizes)


_DEGREE = re.compile("[1-9][0-9]{0,8}")


def _piper_node(node: PiperNode, known: Mapping[Id, object], path: Path, where: str, seconds: float) -> ProfileNode:
    ways: dict[tuple[int, bool], PiperWay] = {}
    for word, listed in node.ways.items():
        if not _DEGREE.fullmatch(word):
            raise InvalidFile(path, f"{where}.TMPCs", "must be a number of devices", "use keys such as 1, 2, 4", value=[word])
        for way in listed:
            ways[int(word), way.id == RECOMPUTED] = way
    if (1, False) not in ways:
        raise InvalidFile(path, f"{where}.TMPCs.1", "lacks the vanilla way on one device, which other planners need", "add it")
    own = ways[1, False]
    split: dict[int, float] = {}
    for t in sorted({t for t, _ in ways}):
        vanilla, again = ways.get((t, False)), ways.get((t, True))
        if vanilla is None:
            raise InvalidFile(path, f"{where}.TMPCs.{t}", "has no way called vanilla", "add it")
        added = again.time - vanilla.time if again else 0.0
        split[t] = added if 0 < added < vanilla.time else vanilla.time / 3
    ids = {str(key): key for key in known}
    variants = []
    for (t, recompute), way in sorted(ways.items()):
        inner = f"{where}.TMPCs.{t}"
        shares = [_share(x, whole, path, inner) for x, whole in ((way.time, own.time), (way.params, own.params))]
        if (t, recompute) != (1, False) or any(way.receive.values()) or any(way.send.values()):
            forward = _share(split[t], own.time, path, inner)
            variants.append(
                Variant(
                    degree=t,
                    recompute=recompute,
                    forward=forward,
                    backward=shares[0] - forward,
                    params=shares[1] if own.params else 1.0,
                    saved_bytes=way.saved,
                    extra_bytes=way.fixed - 2 * way.params,
                    receive=_synced(way.receive, ids, path, f"{inner}.syncTimeFw"),
                    send=_synced(way.send, ids, path, f"{inner}.syncTimeBw"),
                )
            )
    name = node.name or str(node.id)
    forward_s = split[1] * seconds
    return ProfileNode(name, forward_s, own.time * seconds - forward_s, own.params, own.saved, variants=variants)


def _share(amount: float, whole: float, path: Path, where: str) -> float:
    """An amount as a multiple of what one device has in the vanilla way."""
    if amount and not amount <= whole * MOST:
        rule = "is more than any multiple of what it is on one device: time or parameters are zero, or nearly so, there"
        raise InvalidFile(path, where, rule, "correct one")
    return amount / whole if amount else 0.0


def _synced(sizes: Mapping[str, float], ids: Mapping[str, Id], path: Path, where: str) -> tuple[tuple[Any, float], ...]:
    """(node, bytes); the keys of the file are ids as text."""
    for key in sizes:
        if key not in ids:
            raise InvalidFile(path, f"{where}.{key[:40]}", "must be the id of a node", "correct the id")
    return tuple((ids[key], size) for key, size in sizes.items() if size)
