"""A profile as its readers make it, whatever its format: nodes with their times, and tensors; `build` makes the operator graph."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field

from gpp.errors import InvalidFile, written
from gpp.graph.op_graph import Op, OpGraph, Param, Tensor, Variant
from gpp.graph.order import kahn

SETTING = "model.path"
"""The setting that names a profile."""

MOST = 1e18
"""A larger time or size is an error of the file; sums and products of amounts stay finite."""

Amount = Annotated[float, Field(ge=0, le=MOST)]
Id = int | str
OPEN: Any = ConfigDict(extra="ignore")
"""Files of other tools have further keys, which mean nothing here."""


@dataclass(slots=True)
class ProfileNode:
    """An operator of a profile."""

    name: str
    forward_s: float
    backward_s: float
    param_bytes: float
    saved_bytes: float
    weight_s: float = 0.0
    late_bytes: float = 0.0
    variants: list[Variant] = field(default_factory=list)


@dataclass(slots=True)
class ProfileDraft:
    """Nodes by the file's own name, and the bytes of the tensors on edges, in the file's order."""

    path: Path
    nodes: dict[Any, ProfileNode]
    tensors: list[tuple[Any, list[Any], float]]

    def build(self, name: str) -> OpGraph:
        order = self._order()
        at = {key: i for i, key in enumerate(order)}
        names = [self.nodes[key].name for key in order]
        twice = {name for name, count in Counter(names).items() if count > 1}
        names = [f"{n}.{key}" if n in twice else n for n, key in zip(names, order, strict=True)]
        ops, params = [], []

        def numbered(pairs: tuple[tuple[Any, float], ...]) -> tuple[tuple[int, float], ...]:
            return tuple(sorted((at[key], size) for key, size in pairs))

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
                    variants=tuple(replace(one, receive=numbered(one.receive), send=numbered(one.send)) for one in node.variants),
                )
            )
        tensors = tuple(
            Tensor(name=f"{names[a]}.{i}", producer=a, consumers=consumers, bytes_per_sample=size)
            for i, (a, consumers, size) in enumerate(
                sorted((at[key], tuple(sorted(at[c] for c in readers)), size) for key, readers, size in self.tensors)
            )
        )
        return OpGraph(name=name, ops=tuple(ops), tensors=tensors, params=tuple(params))

    def _order(self) -> list[Any]:
        keys = list(self.nodes)
        place = {key: i for i, key in enumerate(keys)}
        readers = [set[int]() for _ in keys]
        for key, consumers, _ in self.tensors:
            readers[place[key]].update(place[c] for c in consumers)
        order = kahn(readers, range(len(keys)))
        if len(order) != len(keys):
            stuck = min(set(range(len(keys))) - set(order))
            rule = f"node {written(keys[stuck])} lies on a cycle; an operator graph has none"
            raise InvalidFile(self.path, "", rule, "remove an edge")
        return [keys[i] for i in order]


def by_id(nodes: tuple[Any, ...], path: Path) -> dict[Id, Any]:
    """The nodes of a file by their `id`.

    Raises:
        InvalidFile: two have the same.
    """
    out: dict[Id, Any] = {}
    for i, node in enumerate(nodes):
        if node.id in out:
            raise InvalidFile(path, f"nodes[{i}].id", "is given twice", "give each node its own id", value=[node.id])
        out[node.id] = node
    return out


def check_ends(a: Id, b: Id, known: Mapping[Id, object], path: Path, edge: int) -> None:
    """Refuse an edge to or from a node that is not there.

    Raises:
        InvalidFile: names the edge.
    """
    if a not in known or b not in known:
        raise InvalidFile(path, f"edges[{edge}]", "joins nodes that are not given", "correct the ids", value=[f"{a} -> {b}"])


def joined(path: Path, nodes: dict[Id, ProfileNode], sizes: Mapping[tuple[Id, Id], float]) -> ProfileDraft:
    """One tensor for all edges from an operator that carry equally much."""
    readers: dict[tuple[Id, float], list[Id]] = defaultdict(list)
    for (a, b), size in sizes.items():
        readers[a, size].append(b)
    return ProfileDraft(path, nodes, [(a, consumers, size) for (a, size), consumers in readers.items()])
