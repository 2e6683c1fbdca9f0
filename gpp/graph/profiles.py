"""Profiles that others measured, as operator graphs; in three formats, which are told apart by their content:

    PipeDream's graph.txt      node4 -- Conv2d(3, 64) -- forward_compute_time=1.2, backward_compute_time=2.4,
                               activation_size=8.0, ...
                               <tab>node4 -- node5                                          (milliseconds, bytes)
    Piper's JSON               {"nodes": [{"id", "TMPCs": {"1": [{"timePerSample", ...}]}}],
                                "edges": [{"sourceId", ...}], ...}
    plain JSON                 {"nodes": [{"id", "name", "fwd_ms", "bwd_ms", "param_bytes", "activation_bytes"}],
                                "edges": [[u, v, bytes]]}; nodes may have "wgt_ms" and "late_bytes", as in `Op`

One sample of ours is one micro-batch of the profile. `forward_flops` and `backward_flops` hold *seconds* a sample,
which `gpp.cost.models.tabulated` reads as they are.

Files are read as follows:
* graph.txt: nodes called `Input...` without predecessors and `__getitem__...` without successors are left out, as in
  PipeDream's optimizer: they compute nothing. An operator has one output of one size, whoever reads it.
* Piper: edges from one operator with equal bytes are one tensor with several readers. `timePerSample` is both passes
  together; the forward pass is the time that recomputation adds to it, or a third. Its `syncTime*` are bytes. The user
  chooses `maxDevices`, `bandwidth`, `maxMemoryPerDevice` and `mbsInBatch` (cluster, mini-batch).
* plain JSON: parallel edges are added up.
"""

from __future__ import annotations

import heapq
import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import ConfigDict, Field, with_config

from gpp.errors import InvalidFile, InvalidGraph, written
from gpp.graph.op_graph import Op, OpGraph, Param, Tensor, Variant
from gpp.serialization import from_json, read_text

SETTING = "model.path"
"""The setting that names the file."""

RECOMPUTED = "activation recomp"
"""Piper's word for it; the other way is called `vanilla`."""


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
        draft = _graph_txt(text, path)
    elif _PIPER.search(text):
        draft = _piper(from_json(PiperProfile, text, path, setting=SETTING), path, seconds)
    else:
        draft = _plain(from_json(PlainProfile, text, path, setting=SETTING), path)
    name = path.name.removesuffix(".graph.txt").removesuffix(".json").removesuffix(".txt")
    try:
        return draft.build(name)
    except InvalidGraph as error:
        raise InvalidFile(path, "", str(error).removesuffix("."), "correct the file") from None


@dataclass(slots=True)
class _Node:
    name: str
    forward_s: float
    backward_s: float
    param_bytes: float
    saved_bytes: float
    weight_s: float = 0.0
    late_bytes: float = 0.0
    variants: list[Variant] = field(default_factory=list)


@dataclass(slots=True)
class _Draft:
    """Nodes by the file's own name, and the bytes of the tensors on edges, in the file's order."""

    path: Path
    nodes: dict[Any, _Node]
    tensors: list[tuple[Any, list[Any], float]]

    def build(self, name: str) -> OpGraph:
        order = self._order()
        at = {key: i for i, key in enumerate(order)}
        names = [self.nodes[key].name for key in order]
        twice = {name for name, count in Counter(names).items() if count > 1}
        names = [f"{n}.{key}" if n in twice else n for n, key in zip(names, order, strict=True)]
        ops, params = [], []
        for op_name, key in zip(names, order, strict=True):
            node = self.nodes[key]
            if node.param_bytes:
                params.append(Param(name=f"{op_name}.weight", num_bytes=round(node.param_bytes)))
            ops.append(
                Op(
                    name=op_name,
                    kind=node.name,
                    forward_flops=node.forward_s,
                    backward_flops=node.backward_s,
                    saved_bytes=node.saved_bytes,
                    weight_flops=node.weight_s,
                    late_bytes=node.late_bytes,
                    params=(f"{op_name}.weight",) if node.param_bytes else (),
                    variants=tuple(self._numbered(variant, at) for variant in node.variants),
                )
            )
        tensors = tuple(
            Tensor(name=f"{names[a]}.{i}", producer=a, consumers=consumers, bytes_per_sample=size)
            for i, (a, consumers, size) in enumerate(
                sorted((at[key], tuple(sorted(at[c] for c in readers)), size) for key, readers, size in self.tensors)
            )
        )
        return OpGraph(name=name, ops=tuple(ops), tensors=tensors, params=tuple(params))

    @staticmethod
    def _numbered(variant: Variant, at: Mapping[Any, int]) -> Variant:
        def numbered(pairs: tuple[tuple[Any, float], ...]) -> tuple[tuple[int, float], ...]:
            return tuple(sorted((at[key], size) for key, size in pairs))

        return Variant(
            degree=variant.degree,
            recompute=variant.recompute,
            forward=variant.forward,
            backward=variant.backward,
            params=variant.params,
            saved_bytes=variant.saved_bytes,
            extra_bytes=variant.extra_bytes,
            receive=numbered(variant.receive),
            send=numbered(variant.send),
        )

    def _order(self) -> list[Any]:
        place = {key: i for i, key in enumerate(self.nodes)}
        readers: dict[Any, set[Any]] = defaultdict(set)
        for key, consumers, _ in self.tensors:
            readers[key].update(consumers)
        missing = dict.fromkeys(self.nodes, 0)
        for consumers in readers.values():
            for c in consumers:
                missing[c] += 1
        ready = [(i, key) for key, i in place.items() if not missing[key]]
        heapq.heapify(ready)
        out = []
        while ready:
            _, key = heapq.heappop(ready)
            out.append(key)
            for c in readers[key]:
                missing[c] -= 1
                if not missing[c]:
                    heapq.heappush(ready, (place[c], c))
        if len(out) != len(self.nodes):
            stuck = next(key for key in self.nodes if missing[key] > 0)
            rule = f"node {written(stuck)} lies on a cycle; an operator graph has none"
            raise InvalidFile(self.path, "", rule, "remove an edge")
        return out


def _graph_txt(text: str, path: Path) -> _Draft:
    nodes: dict[str, _Node] = {}
    edges: list[tuple[str, str]] = []
    sizes: dict[str, float] = {}
    descriptions: dict[str, str] = {}
    for number, line in enumerate(text.split("\n"), 1):
        where = f":{number}"
        if not line.strip():
            continue
        words = line.strip().split(" -- ")
        if line.startswith("\t") or (len(words) == 2 and "=" not in line):
            if len(words) != 2 or words[0] not in nodes or words[1] not in nodes:
                rule = "an edge joins two nodes given above it"
                raise InvalidFile(path, where, rule, "write `node1 -- node2`", value=[line.strip()])
            edges.append((words[0], words[1]))
            continue
        if len(words) < 3:
            raise InvalidFile(
                path,
                where,
                "is neither a node (`id -- description -- forward_compute_time=..`) nor an edge of PipeDream's graph.txt, "
                "and the file is no JSON object",
                "give a graph.txt of PipeDream, a JSON file of Piper, or plain JSON",
                value=[line.strip()],
            )
        if words[0] in nodes:
            raise InvalidFile(path, where, "is given twice", "give each node once", value=[words[0]])
        values = dict(word.split("=", 1) for word in words[2].split(", ") if "=" in word)
        read = {name: _graph_number(values, name, path, where) for name in GRAPH_FIELDS}
        forward, backward, sizes[words[0]], params = read.values()
        descriptions[words[0]] = words[1]
        nodes[words[0]] = _Node(
            f"{words[0]}.{words[1].split('(')[0].strip() or 'op'}", forward / 1e3, backward / 1e3, params, sizes[words[0]]
        )
    edges = list(dict.fromkeys(edges))
    for keyword, end in (("Input", 1), ("__getitem__", 0)):
        with_neighbours = {edge[end] for edge in edges}
        gone = {key for key in nodes if descriptions[key].startswith(keyword) and key not in with_neighbours}
        edges = [edge for edge in edges if not gone & set(edge)]
        nodes = {key: node for key, node in nodes.items() if key not in gone}
    if not nodes:
        raise InvalidFile(path, "", "a profile has at least one operator", "check the file")
    readers = {key: list[str]() for key in nodes}
    for a, b in edges:
        readers[a].append(b)
    return _Draft(path, nodes, [(key, readers[key], sizes[key]) for key in nodes])


GRAPH_FIELDS = ("forward_compute_time", "backward_compute_time", "activation_size", "parameter_size")


def _graph_number(values: Mapping[str, str], name: str, path: Path, where: str) -> float:
    text = values.get(name)
    if text is None:
        fix = f"give {', '.join(f'{n}=..' for n in GRAPH_FIELDS)}, separated by `, `"
        raise InvalidFile(path, where, f"{name} is missing", fix)
    try:
        # Several outputs are written as [a; b; c].
        amounts = [float(word) for word in text.strip("[]").split("; ")]
    except ValueError:
        raise InvalidFile(path, f"{where} {name}", "must be a number, or [a; b]", "correct the number", value=[text]) from None
    # Not a number is in no range.
    if not all(0 <= amount <= MOST for amount in amounts) or sum(amounts) > MOST:
        raise InvalidFile(path, f"{where} {name}", f"must be at least 0, and at most {MOST:g}", "correct the number", value=[text])
    return sum(amounts)


MOST = 1e18
"""A larger time or size is an error of the file; sums and products of amounts stay finite."""

Amount = Annotated[float, Field(ge=0, le=MOST)]
Id = int | str
OPEN: Any = ConfigDict(extra="ignore")
"""Files of other tools have further keys, which mean nothing here."""


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


_PIPER = re.compile(r'"TMPCs"\s*:')


def _plain(profile: PlainProfile, path: Path) -> _Draft:
    known, nodes = _by_id(profile.nodes, path), dict[Id, _Node]()
    for key, n in known.items():
        forward, backward, weight = n.fwd_ms / 1e3, n.bwd_ms / 1e3, n.wgt_ms / 1e3
        name = str(key) if n.name is None else n.name
        nodes[key] = _Node(name, forward, backward, n.param_bytes, n.activation_bytes, weight, n.late_bytes)
    sizes: dict[tuple[Id, Id], float] = defaultdict(float)
    for i, (a, b, size) in enumerate(profile.edges):
        _check_ends(a, b, known, path, i)
        sizes[a, b] += size
    return _joined(path, nodes, sizes)


def _piper(profile: PiperProfile, path: Path, seconds: float) -> _Draft:
    known = _by_id(profile.nodes, path)
    nodes = {key: _piper_node(node, known, path, f"nodes[{i}]", seconds) for i, (key, node) in enumerate(known.items())}
    sizes: dict[tuple[Id, Id], float] = {}
    for i, edge in enumerate(profile.edges):
        a, b = edge.source, edge.target
        _check_ends(a, b, known, path, i)
        if (a, b) in sizes:
            raise InvalidFile(path, f"edges[{i}]", "is given twice", "give each edge once", value=[f"{a} -> {b}"])
        sizes[a, b] = edge.size
    return _joined(path, nodes, sizes)


N = TypeVar("N", "PlainNode", "PiperNode")


def _by_id(nodes: tuple[N, ...], path: Path) -> dict[Id, N]:
    out: dict[Id, N] = {}
    for i, node in enumerate(nodes):
        if node.id in out:
            raise InvalidFile(path, f"nodes[{i}].id", "is given twice", "give each node its own id", value=[node.id])
        out[node.id] = node
    return out


def _check_ends(a: Id, b: Id, known: Mapping[Id, object], path: Path, edge: int) -> None:
    if a not in known or b not in known:
        raise InvalidFile(path, f"edges[{edge}]", "joins nodes that are not given", "correct the ids", value=[f"{a} -> {b}"])


def _joined(path: Path, nodes: dict[Id, _Node], sizes: Mapping[tuple[Id, Id], float]) -> _Draft:
    """One tensor for all edges from an operator that carry equally much."""
    readers: dict[tuple[Id, float], list[Id]] = defaultdict(list)
    for (a, b), size in sizes.items():
        readers[a, size].append(b)
    return _Draft(path, nodes, [(a, consumers, size) for (a, size), consumers in readers.items()])


_DEGREE = re.compile("[1-9][0-9]{0,8}")


def _piper_node(node: PiperNode, known: Mapping[Id, object], path: Path, where: str, seconds: float) -> _Node:
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
    return _Node(name, forward_s, own.time * seconds - forward_s, own.params, own.saved, variants=variants)


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
