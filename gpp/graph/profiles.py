"""Profiles that others measured, as operator graphs.

There are three formats, told apart by their content:

    PipeDream's graph.txt      node4 -- Conv2d(3, 64) -- forward_compute_time=1.2, backward_compute_time=2.4,
                               activation_size=8.0, ...
                               <tab>node4 -- node5                                          (milliseconds, bytes)
    Piper's JSON               {"nodes": [{"id", "TMPCs": {"1": [{"timePerSample", ...}]}}],
                                "edges": [{"sourceId", ...}], ...}
    plain JSON                 {"nodes": [{"id", "name", "fwd_ms", "bwd_ms", "param_bytes", "activation_bytes"}],
                                "edges": [[u, v, bytes]]}

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
import json
import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpp.errors import InvalidConfig
from gpp.graph.op_graph import Op, OpGraph, Param, Tensor, Variant

RECOMPUTED = "activation recomp"
"""Piper's word for it; the other way is called `vanilla`."""


def read_profile(path: str | Path, *, seconds: float = 1.0) -> OpGraph:
    """The operator graph of a profile, operators in a topological order in which the file's order breaks ties.

    Args:
        seconds: length of one unit of Piper's times. Its own ResNet and GNMT files are in milliseconds: 1e-3.

    Raises:
        InvalidConfig: there is no such file, it has none of the formats, or a field is missing or wrong; the message
            names the line or the node.
    """
    path = Path(path)
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidConfig("model.path", path, f"must be a readable profile ({error})", "correct the path") from None
    draft = _json(text, str(path), seconds) if text.lstrip().startswith("{") else _graph_txt(text, str(path))
    return draft.build(path.name.removesuffix(".graph.txt").removesuffix(".json").removesuffix(".txt"))


@dataclass(slots=True)
class _Node:
    name: str
    forward_s: float
    backward_s: float
    param_bytes: float
    saved_bytes: float
    variants: list[Variant] = field(default_factory=list)


@dataclass(slots=True)
class _Draft:
    """Nodes by the file's own name, and the bytes of the tensors on edges, in the file's order."""

    where: str
    nodes: dict[Any, _Node]
    tensors: list[tuple[Any, list[Any], float]]

    def build(self, name: str) -> OpGraph:
        order = self._order()
        at = {key: i for i, key in enumerate(order)}
        names = [self.nodes[key].name for key in order]
        twice = {n for n in names if names.count(n) > 1}
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
            raise InvalidConfig(self.where, stuck, "lies on a cycle; an operator graph has none", "remove an edge")
        return out


def _graph_txt(text: str, path: str) -> _Draft:
    nodes: dict[str, _Node] = {}
    edges: list[tuple[str, str]] = []
    sizes: dict[str, float] = {}
    descriptions: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        where = f"{path}:{number}"
        if not line.strip():
            continue
        words = line.strip().split(" -- ")
        if line.startswith("\t") or (len(words) == 2 and "=" not in line):
            if len(words) != 2 or words[0] not in nodes or words[1] not in nodes:
                raise InvalidConfig(where, line.strip(), "an edge joins two nodes given above it", "write `node1 -- node2`")
            edges.append((words[0], words[1]))
            continue
        if len(words) < 3:
            raise InvalidConfig(
                where,
                line.strip()[:60],
                "is neither a node (`id -- description -- forward_compute_time=..`) nor an edge of PipeDream's graph.txt, "
                "and the file is no JSON object",
                "give a graph.txt of PipeDream, a JSON file of Piper, or plain JSON",
            )
        if words[0] in nodes:
            raise InvalidConfig(where, words[0], "is given twice", "give each node once")
        values = dict(word.split("=", 1) for word in words[2].split(", ") if "=" in word)
        read = {name: _graph_number(values, name, where) for name in GRAPH_FIELDS}
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
        raise InvalidConfig(path, "no nodes", "a profile has at least one operator", "check the file")
    readers: dict[str, list[str]] = {key: [] for key in nodes}
    for a, b in edges:
        readers[a].append(b)
    return _Draft(path, nodes, [(key, readers[key], sizes[key]) for key in nodes])


GRAPH_FIELDS = ("forward_compute_time", "backward_compute_time", "activation_size", "parameter_size")


def _graph_number(values: Mapping[str, str], name: str, where: str) -> float:
    text = values.get(name)
    if text is None:
        raise InvalidConfig(where, name, "is missing", f"give {', '.join(f'{n}=..' for n in GRAPH_FIELDS)}, separated by `, `")
    try:
        # Several outputs are written as [a; b; c].
        value = sum(float(word) for word in text.strip("[]").split("; "))
    except ValueError:
        raise InvalidConfig(where, f"{name}={text}", "must be a number, or [a; b]", "correct the number") from None
    return _amount(value, f"{where} {name}")


def _amount(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
        raise InvalidConfig(where, value, "must be a number of at least 0", "correct the number")
    return float(value)


def _get(entry: Any, name: str, where: str, kind: type | tuple[type, ...] = object) -> Any:
    if not isinstance(entry, dict) or name not in entry:
        raise InvalidConfig(where, name, "is missing", f"give {name}")
    if not isinstance(entry[name], kind):
        raise InvalidConfig(f"{where}.{name}", str(entry[name])[:40], "is of the wrong type", "see the format's description")
    return entry[name]


def _json(text: str, path: str, seconds: float) -> _Draft:
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        raise InvalidConfig(f"{path}:{error.lineno}", error.msg, "must be JSON", "correct the file") from None
    listed = _get(content, "nodes", path, list)
    if not listed:
        raise InvalidConfig(path, "nodes=[]", "a profile has at least one operator", "check the file")
    piper = isinstance(listed[0], dict) and "TMPCs" in listed[0]
    by_id: dict[Any, tuple[str, Any]] = {}
    for i, entry in enumerate(listed):
        key = _get(entry, "id", f"{path} nodes[{i}]", (int, str))
        if key in by_id:
            raise InvalidConfig(f"{path} nodes[{i}].id", key, "is given twice", "give each node its own id")
        by_id[key] = (f"{path} node {key}", entry)
    edges = _edges(content, path, by_id, piper)
    read: Callable[[Any, str, float], _Node] = _piper_node if piper else _plain_node
    nodes = {key: read(entry, where, seconds) for key, (where, entry) in by_id.items()}
    readers: dict[tuple[Any, float], list[Any]] = defaultdict(list)
    for (a, b), size in edges.items():
        readers[a, size].append(b)
    return _Draft(path, nodes, [(a, consumers, size) for (a, size), consumers in readers.items()])


def _edges(content: Any, path: str, known: Mapping[Any, Any], piper: bool) -> dict[tuple[Any, Any], float]:
    out: dict[tuple[Any, Any], float] = {}
    for i, edge in enumerate(_get(content, "edges", path, list)):
        where = f"{path} edges[{i}]"
        if piper:
            a, b, size = (_get(edge, name, where) for name in ("sourceId", "destId", "communicationCost"))
        elif isinstance(edge, list) and len(edge) == 3:
            a, b, size = edge
        else:
            raise InvalidConfig(where, str(edge)[:40], "must be [from, to, bytes]", "correct the edge")
        if a not in known or b not in known:
            raise InvalidConfig(where, f"{a} -> {b}", "joins nodes that are not given", "correct the ids")
        if piper and (a, b) in out:
            raise InvalidConfig(where, f"{a} -> {b}", "is given twice", "give each edge once")
        out[a, b] = out.get((a, b), 0.0) + _amount(size, where)
    return out


def _plain_node(entry: Any, where: str, seconds: float) -> _Node:
    forward, backward, params, saved = (
        _amount(_get(entry, name, where), f"{where} {name}") for name in ("fwd_ms", "bwd_ms", "param_bytes", "activation_bytes")
    )
    return _Node(str(entry.get("name", entry["id"])), forward / 1e3, backward / 1e3, params, saved)


def _piper_node(entry: Any, where: str, seconds: float) -> _Node:
    ways: dict[tuple[int, bool], dict[str, Any]] = {}
    for word, listed in _get(entry, "TMPCs", where, dict).items():
        if not word.isdigit() or int(word) < 1:
            raise InvalidConfig(f"{where} TMPCs", word, "must be a number of devices", "use keys such as 1, 2, 4")
        for way in listed:
            ways[int(word), _get(way, "id", f"{where} TMPCs.{word}") == RECOMPUTED] = _piper_way(
                way, f"{where} TMPCs.{word}", seconds
            )
    if (1, False) not in ways:
        raise InvalidConfig(where, "TMPCs.1", "lacks the vanilla way on one device, which other planners need", "add it")
    own = ways[1, False]
    total, size = own["time"], own["params"]
    split: dict[int, float] = {}
    for t in sorted({t for t, _ in ways}):
        vanilla, again = ways.get((t, False)), ways.get((t, True))
        if vanilla is None:
            raise InvalidConfig(where, f"TMPCs.{t}", "has no way called vanilla", "add it")
        added = again["time"] - vanilla["time"] if again else 0.0
        split[t] = added if 0 < added < vanilla["time"] else vanilla["time"] / 3
    variants = []
    for (t, recompute), way in sorted(ways.items()):
        if (way["time"] and not total) or (way["params"] and not size):
            raise InvalidConfig(f"{where} TMPCs.{t}", "time or parameters", "are zero on one device, but not here", "correct one")
        if (t, recompute) != (1, False) or way["receive"] or way["send"]:
            variants.append(
                Variant(
                    degree=t,
                    recompute=recompute,
                    forward=split[t] / total if total else 0.0,
                    backward=(way["time"] - split[t]) / total if total else 0.0,
                    params=way["params"] / size if size else 1.0,
                    saved_bytes=way["saved"],
                    extra_bytes=way["fixed"] - 2 * way["params"],
                    receive=way["receive"],
                    send=way["send"],
                )
            )
    name = str(entry.get("name") or entry["id"])
    return _Node(name, split[1], total - split[1], size, own["saved"], variants)


def _piper_way(way: Any, where: str, seconds: float) -> dict[str, Any]:
    def number(name: str) -> float:
        return _amount(_get(way, name, where), f"{where}.{name}")

    def sync(name: str) -> tuple[tuple[Any, float], ...]:
        # Keys are numbers as text; a node's id is a number.
        pairs = _get(way, name, where, dict).items()
        return tuple((int(key), _amount(size, f"{where}.{name}.{key}")) for key, size in pairs if size)

    return {
        "time": number("timePerSample") * seconds,
        "params": number("parameterSize"),
        "saved": number("memoryUsageA"),
        "fixed": number("memoryUsageB"),
        "receive": sync("syncTimeFw"),
        "send": sync("syncTimeBw"),
    }
