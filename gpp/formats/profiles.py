"""Profiles that others measured, as operator graphs.

There are three formats, which are told apart by their content: PipeDream's graph.txt, Piper's JSON and plain JSON. One sample of
ours is one micro-batch of the profile. `forward_flops` and `backward_flops` hold *seconds* a sample, which
`gpp.cost.models.constant` reads as they are.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field, with_config

from gpp.errors import InvalidFile, InvalidGraph
from gpp.formats.draft import OPEN, SETTING, Amount, Id, ProfileDraft, ProfileNode, by_id, check_ends, joined
from gpp.formats.pipedream import read_graph_txt
from gpp.formats.piper import PIPER, read_piper
from gpp.graph.op_graph import OpGraph
from gpp.serialization import from_json, read_text


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


def read_profile(path: str | Path, *, seconds: float = 1.0) -> OpGraph:
    """The operator graph of a profile, operators in a topological order in which the file's order breaks ties.

    Args:
        seconds: length of one unit of Piper's times. Its own ResNet and GNMT files are in milliseconds: 1e-3.

    Raises:
        InvalidFile: the file cannot be read, it has none of the formats, or a field is missing or wrong; names the place.
    """
    path = Path(path)
    text = read_text(path, setting=SETTING)
    if not text.lstrip().startswith("{"):
        draft = read_graph_txt(text, path)
    elif PIPER.search(text):
        draft = read_piper(text, path, seconds)
    else:
        draft = read_plain(text, path)
    name = path.name.removesuffix(".graph.txt").removesuffix(".json").removesuffix(".txt")
    try:
        return draft.build(name)
    except InvalidGraph as error:
        raise InvalidFile(path, "", str(error).removesuffix("."), "correct the file") from None
