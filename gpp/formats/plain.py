"""Plain JSON:

    {"nodes": [{"id", "name", "fwd_ms", "bwd_ms", "param_bytes", "activation_bytes"}], "edges": [[u, v, bytes]]}

Nodes may have "wgt_ms" and "late_bytes", as in `Op`. Parallel edges are added up.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field, with_config

from gpp.formats.draft import OPEN, SETTING, Amount, Id, ProfileDraft, ProfileNode, by_id, check_ends, joined
from gpp.serialization import from_json


@with_config(OPEN)
@dataclass(frozen=True, slots=True, kw_only=True)
class PlainNode:
    """A node of plain JSON: milliseconds and bytes."""

    id: Id
    fwd_ms: Amount
    bwd_ms: Amount
    param_bytes: Amount
    activation_bytes: Amount
    name: str | None = None
    wgt_ms: Amount = 0.0
    late_bytes: Amount = 0.0


@with_config(OPEN)
@dataclass(frozen=True, slots=True, kw_only=True)
class PlainProfile:
    """Plain JSON; an edge is from, to, bytes."""

    nodes: Annotated[tuple[PlainNode, ...], Field(min_length=1)]
    edges: tuple[tuple[Id, Id, Amount], ...]


def read_plain(text: str, path: Path) -> ProfileDraft:
    """The profile in plain JSON.

    Raises:
        InvalidFile: a field is missing or wrong; names the place.
    """
    profile = from_json(PlainProfile, text, path, setting=SETTING)
    known, nodes = by_id(profile.nodes, path), dict[Id, ProfileNode]()
    for key, n in known.items():
        forward, backward, weight = n.fwd_ms / 1e3, n.bwd_ms / 1e3, n.wgt_ms / 1e3
        name = str(key) if n.name is None else n.name
        nodes[key] = ProfileNode(name, forward, backward, n.param_bytes, n.activation_bytes, weight, n.late_bytes)
    sizes: dict[tuple[Id, Id], float] = defaultdict(float)
    for i, (a, b, size) in enumerate(profile.edges):
        check_ends(a, b, known, path, i)
        sizes[a, b] += size
    return joined(path, nodes, sizes)
