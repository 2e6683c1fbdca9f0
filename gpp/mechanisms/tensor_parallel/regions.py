"""Which operators of a captured model run on shards, at one tensor-parallel degree (Megatron-LM: Shoeybi et al., 2019).

A region begins with products by columns and ends with products by rows; between them stands what runs on shards (the table of
rules): activations, reshapes, attention by heads.

    x ── columns ── gelu ── rows ──(sum)── y          forward: y is summed        backward: x's gradient is summed

A region is found from its end. The input of a product is taken to be split along its last dimension, and the rules say,
forwards and backwards along the graph, how all other tensors must lie then. If that ends in parameters everywhere, they
are split. If it meets an operator without a rule, or a tensor that somebody needs whole, the product stays whole. So
regions follow from the structure of the graph, and not from names of modules. An embedding table that has more rows
than a sample reads is split by rows.

Everything outside of the regions runs on whole tensors, on all members alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from gpp.graph.captured import Captured, Node, ref
from gpp.mechanisms.tensor_parallel.layout import Nodes, Shard, fits
from gpp.mechanisms.tensor_parallel.rules import RULES, Applied, operands

_ENDS = ("aten.linear.default", "aten.addmm.default", "aten.matmul.default", "aten.mm.default")
_TABLE = "aten.embedding.default"


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """How a model runs on `degree` devices that share one replica.

    Args:
        layouts: parameters and tensors that are split; all others are whole on every member.
        applied: the operators that run on shards.
        tables: embedding tables among `layouts`, whose shares may differ by a row.
    """

    degree: int
    layouts: dict[str, Shard] = field(default_factory=dict)
    applied: dict[str, Applied] = field(default_factory=dict)
    tables: set[str] = field(default_factory=set)

    def entered(self, node: Node) -> Iterator[str]:
        """Whole operands of an operator on shards of whose gradient each member makes a part.

        What is added to a sum, once it is made, is none of them.
        """
        found = self.applied.get(node.name)
        if found is not None and not found.summed:
            yield from (name for name, shard in found.needs.items() if shard is None)


def shard(captured: Captured, degree: int) -> Sharding:
    """Regions of a model, in the order of its nodes; a tensor is in one of them at most."""
    nodes, out = Nodes(captured, degree), Sharding(degree=degree)
    for node in captured.nodes:
        if node.kind != "call" or node.free or node.name in out.applied:
            continue
        region = _Region(nodes, out)
        if node.target == _TABLE:
            weight = ref(node.args[0])
            if weight is None or not _worth_splitting(node, weight, nodes, degree) or not region.grow(weight, Shard(0)):
                continue
            out.tables.add(weight)
        elif node.target in _ENDS:
            x = _input(node)
            if x is None or not region.grow(x, Shard(len(nodes.shape(x)) - 1)):
                continue
        else:
            continue
        out.layouts.update(region.layouts)
        out.applied.update(region.applied)
    return out


def _input(node: Node) -> str | None:
    """The operand of a product that is no parameter."""
    return ref(node.args[1]) if node.target == "aten.addmm.default" else ref(node.args[0])


def _worth_splitting(node: Node, weight: str, nodes: Nodes, degree: int) -> bool:
    """Whether a table has more rows than a sample looks up."""
    ids, found = ref(node.args[1]), nodes.node_of[weight]
    if ids is None or found.kind != "param":
        return False
    lookups = math.prod(extent for extent in nodes.node_of[ids].shape or () if isinstance(extent, int))
    return nodes.shape(weight)[0] >= max(lookups + 1, degree)


class _RegionRefused(Exception):
    """The region cannot be: an operator has no rule for it, or a tensor is needed whole."""


class _Region:
    """One region, while it grows."""

    def __init__(self, nodes: Nodes, taken: Sharding) -> None:
        self.nodes, self.taken = nodes, taken
        self.layouts: dict[str, Shard] = {}
        self.applied: dict[str, Applied] = {}
        self._todo: list[str] = []
        self._results = set(nodes.captured.results.values())

    def grow(self, name: str, layout: Shard) -> bool:
        """Split tensor `name`, and whatever must be split then; whether that can be."""
        try:
            self._split(name, layout)
            while self._todo:
                self._around(self._todo.pop())
            self._prove()
        except _RegionRefused:
            return False
        return bool(self.applied)

    def _around(self, name: str) -> None:
        """Ask the maker of a split tensor, and all that read it."""
        node = self.nodes.node_of[name]
        if node.kind == "call":
            self._apply(node)
        for reader in self.nodes.readers[name]:
            self._apply(reader)

    def _apply(self, node: Node) -> None:
        rule = RULES.get(node.target)
        if node.kind != "call" or rule is None or node.name in self.taken.applied or node.after or node.mutates or node.free:
            raise _RegionRefused
        found = rule(node, self.layouts.get, self.nodes)
        if found is None:
            raise _RegionRefused
        self.applied[node.name] = found
        if found.out is not None:
            self._split(node.name, found.out)
        for name, need in found.needs.items():
            if need is not None:
                self._split(name, need)

    def _split(self, name: str, layout: Shard) -> None:
        node, known = self.nodes.node_of[name], self.layouts.get(name)
        if known is not None:
            if known != layout:
                raise _RegionRefused
            return
        by_rows = node.kind == "param" and layout == Shard(0) and all(n.target == _TABLE for n in self.nodes.readers[name])
        split = node.shape is None or by_rows or fits(self.nodes.shape(name), layout, self.nodes.degree)
        if not split or name in self.taken.layouts or name in self._results:
            raise _RegionRefused
        # Inputs, buffers and what follows from them alone are whole everywhere: each member takes its share where it reads them.
        if node.kind == "param" or (node.kind == "call" and not node.free):
            self.layouts[name] = layout
            self._todo.append(name)

    def _prove(self) -> None:
        """Every operator still needs what it was asked for, nothing that is needed whole is split, and products begin and end it.

        Raises:
            _RegionRefused: that does not hold.
        """
        begins = ends = False
        for name, applied in self.applied.items():
            node = self.nodes.node_of[name]
            if RULES[node.target](node, self.layouts.get, self.nodes) != applied:
                raise _RegionRefused
            if any(need != self.layouts.get(x) and (need is None or x in self.layouts) for x, need in applied.needs.items()):
                raise _RegionRefused
            split = [x for x in operands(node) if x in self.layouts and self.nodes.node_of[x].kind == "param"]
            ends |= applied.summed
            begins |= bool(split) and (not applied.summed or node.target == _TABLE)
        if not (begins and ends):
            raise _RegionRefused
