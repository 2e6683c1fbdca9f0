"""Series-parallel structure of an operator graph.

An order of operators is series-parallel when it is one operator, or two such orders side by side
(`Parallel`: nothing in one depends on the other), or one after the other (`Series`: everything in the
second depends on everything in the first). The structure is read off the reachability relation, which is the same as
the vertex-series-parallel decomposition of the transitive reduction with a virtual source and sink
(Valdes, Tarjan and Lawler, "The recognition of series parallel digraphs", 1982). So models of several
inputs or outputs need no special case, and a skip edge that runs beside a path does not disturb the
tree (its tensor still costs communication, which the cost model counts).

Sets of operators are masks (bit i = operator i). The decomposition of any subset is unique, so a mask
alone names a sub-problem of the planners.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from gpp.graph.op_graph import OpGraph, bits, mask_of


@dataclass(frozen=True, slots=True)
class Leaf:
    """One operator."""

    op: int

    @property
    def mask(self) -> int:
        return 1 << self.op


@dataclass(frozen=True, slots=True)
class Series:
    """Children one after the other, in order; none of them is a Series."""

    children: tuple[Leaf | Parallel, ...]
    mask: int


@dataclass(frozen=True, slots=True)
class Parallel:
    """Children side by side, by smallest operator; none of them is a Parallel."""

    children: tuple[Leaf | Series, ...]
    mask: int


T = TypeVar("T")
SPTree = Leaf | Series | Parallel


class Dependency(NamedTuple):
    """An order between two operators that no tensor requires."""

    before: int
    after: int


@dataclass(slots=True)
class Order:
    """Reachability between operators, and the two ways to take a subset apart.

    Args:
        descendants, ancestors: for each operator, a mask without itself; transitively closed.
    """

    descendants: list[int]
    ancestors: list[int]
    _items: dict[int, tuple[int, ...]] = field(default_factory=dict)
    _components: dict[int, tuple[int, ...]] = field(default_factory=dict)

    @classmethod
    def of(cls, graph: OpGraph) -> Order:
        """The order that the graph's tensors impose."""
        return cls(list(graph.descendants), list(graph.ancestors))

    def topological(self, mask: int) -> list[int]:
        """Operators of a set, by number of ancestors, then by number."""
        return sorted(bits(mask), key=lambda op: self.ancestors[op].bit_count())

    def series_items(self, mask: int) -> tuple[int, ...]:
        """The finest cut of a set into pieces such that each piece wholly precedes the next.

        Every such cut is a prefix of any topological order of the set.
        """
        if mask not in self._items:
            items, piece, rest, common = [], 0, mask, mask
            for op in self.topological(mask):
                piece |= 1 << op
                rest ^= 1 << op
                common &= self.descendants[op]
                if not rest & ~common:
                    items.append(piece)
                    piece, common = 0, rest
            self._items[mask] = tuple(items)
        return self._items[mask]

    def components(self, mask: int) -> tuple[int, ...]:
        """The finest cut of a set into pieces without any dependency between them, by smallest operator."""
        if mask not in self._components:
            pieces, rest = [], mask
            while rest:
                piece = frontier = rest & -rest
                while frontier:
                    reached = 0
                    for op in bits(frontier):
                        reached |= self.descendants[op] | self.ancestors[op]
                    frontier = reached & mask & ~piece
                    piece |= frontier
                pieces.append(piece)
                rest &= ~piece
            self._components[mask] = tuple(pieces)
        return self._components[mask]

    def put_before(self, first: int, second: int) -> None:
        """Make every operator of mask `first` precede every one of mask `second`."""
        above, below = first, second
        for op in bits(first):
            above |= self.ancestors[op]
        for op in bits(second):
            below |= self.descendants[op]
        for op in bits(above):
            self.descendants[op] |= below
        for op in bits(below):
            self.ancestors[op] |= above
        self._items.clear()
        self._components.clear()

    def sinks(self, mask: int) -> list[int]:
        """Operators of a set that no other operator of the set depends on."""
        return sorted(op for op in _last(mask, self.ancestors) if not self.descendants[op] & mask)

    def sources(self, mask: int) -> list[int]:
        """Operators of a set that depend on no other operator of the set."""
        return sorted(op for op in _first(mask, self.descendants) if not self.ancestors[op] & mask)

    def tree(self, mask: int) -> SPTree | None:
        """The series-parallel tree of a set; None if there is none."""
        if not mask & (mask - 1):
            return Leaf(mask.bit_length() - 1)
        for cut, node in ((self.components, Parallel), (self.series_items, Series)):
            pieces = cut(mask)
            if len(pieces) > 1:
                children = [self.tree(piece) for piece in pieces]
                return None if None in children else node(tuple(children), mask)  # pyright: ignore[reportArgumentType]  # kinds alternate
        return None


def _last(mask: int, ancestors: Sequence[int]) -> Iterator[int]:
    """Operators of a set, among them all without a descendant in it; of a deep set few others, for the highest numbers go first."""
    while mask:
        op = mask.bit_length() - 1
        yield op
        mask &= ~(ancestors[op] | 1 << op)


def _first(mask: int, descendants: Sequence[int]) -> Iterator[int]:
    """Operators of a set, among them all without an ancestor in it, and few others: the lowest numbers go first."""
    while mask:
        op = (mask & -mask).bit_length() - 1
        yield op
        mask &= ~(descendants[op] | 1 << op)


def critical_path(order: Order, mask: int, weights: Sequence[float]) -> float:
    """The heaviest path inside a set (operators weighted, edges not)."""
    return max((start + weights[op] for op, start in _earliest(order, mask, weights).items()), default=0.0)


def _earliest(order: Order, mask: int, weights: Sequence[float]) -> dict[int, float]:
    """Earliest start of each operator of a set, in a topological order."""
    start: dict[int, float] = {}
    finish: dict[int, float] = {}
    for op in order.topological(mask):
        # No operator ends before its ancestors.
        start[op] = max((finish[a] for a in _last(order.ancestors[op] & mask, order.ancestors)), default=0.0)
        finish[op] = start[op] + weights[op]
    return start


Barrier = Callable[[Order, int, Sequence[float]], int]
"""(order, region, weights) -> the half of the region that comes first; it holds all ancestors of its operators."""


def series_parallel_order(
    graph: OpGraph, weights: Sequence[float], barrier: Barrier | None = None
) -> tuple[SPTree, tuple[Dependency, ...], Order]:
    """A series-parallel tree of any graph, by adding dependencies where it has none.

    Adding an order never changes what is computed. Series and parallel cuts are taken first, so the
    first set that has neither is the smallest region that is not series-parallel; only that region is
    cut in two by a barrier, and its halves are decomposed in turn. Barriers follow the operators' earliest
    or latest times, or put one operator and its ancestors first; the one with the shortest critical path
    is taken, then the one with the fewest new dependencies.

    Args:
        weights: seconds of each operator.
        barrier: where to cut a region; None for `shortest_barrier`, as above.

    Returns:
        The tree, the dependencies that were added (none for a series-parallel graph), and the order with them.
    """
    order, added = Order.of(graph), []
    pending = [graph.all_mask]
    while pending:
        mask = pending.pop()
        if not mask & (mask - 1):
            continue
        pieces = order.components(mask)
        if len(pieces) == 1:
            pieces = order.series_items(mask)
        if len(pieces) == 1:
            first = (barrier or shortest_barrier)(order, mask, weights)
            pieces = (first, mask & ~first)
            added += [
                Dependency(a, b)
                for a in order.sinks(pieces[0])
                for b in order.sources(pieces[1])
                if not order.descendants[a] >> b & 1
            ]
            order.put_before(*pieces)
        pending.extend(pieces)
    tree = order.tree(graph.all_mask)
    assert tree is not None, "every region was cut down to single operators"
    return tree, tuple(sorted(added)), order


MAX_BARRIERS = 16  # of each kind, tried for a region; the limit keeps a random graph of 1,000 operators within seconds


def branch_barrier(order: Order, mask: int, weights: Sequence[float]) -> int:
    """A barrier that puts operators that depend on one source of the region first, and those that join several last.

    Towers that exchange values at several depths stay whole; the price is that a tower's last part no
    longer runs beside the first exchange. Where nothing is joined, `shortest_barrier` decides.
    """
    first, sources = 0, mask_of(order.sources(mask))
    for op in order.topological(mask):
        if ((order.ancestors[op] | 1 << op) & sources).bit_count() == 1:
            first |= 1 << op
    return first if sources.bit_count() > 1 and first != mask else shortest_barrier(order, mask, weights)


def shortest_barrier(order: Order, mask: int, weights: Sequence[float]) -> int:
    """The first half that lengthens the critical path least, for a region with neither a series nor a parallel cut."""
    start = _earliest(order, mask, weights)
    ops = list(start)
    tail: dict[int, float] = {}
    for op in reversed(ops):
        tail[op] = weights[op] + max((tail[d] for d in _first(order.descendants[op] & mask, order.descendants)), default=0.0)
    # Each of these holds all ancestors (inside the region) of its operators.
    halves = [(order.ancestors[op] & mask) | 1 << op for op in _sample(ops)]
    halves += [mask_of(op for op in ops if start[op] < time) for time in _sample(sorted(set(start.values())))]
    halves += [mask_of(op for op in ops if tail[op] > time) for time in _sample(sorted(set(tail.values())))]

    def cost(first: int) -> tuple[float, int, int]:
        second = mask & ~first
        behind = mask_of(order.sources(second))
        added = sum((behind & ~order.descendants[a]).bit_count() for a in order.sinks(first))
        # Heaviest path through the barrier: the longest way to a sink before it, from a source after it.
        before = max(start[op] + weights[op] for op in bits(first))
        return before + max(tail[op] for op in bits(second)), added, first

    return min({half for half in halves if half and half != mask}, key=cost)


def _sample(values: Sequence[T]) -> Sequence[T]:
    return values[:: -(-len(values) // MAX_BARRIERS)]


def branches(graph: OpGraph) -> tuple[int | None, ...]:
    """For each operator the outermost parallel branch that it belongs to; None on the trunk.

    Branches are numbered in the order of their parallel blocks, then of their smallest operator. A
    graph that is not series-parallel is read with the dependencies of `series_parallel_order` added.

    >>> branches(equal_towers(5, num_branches=2))
    (0, 0, 1, 1, None)
    """
    weights = [op.forward_flops + op.backward_flops for op in graph.ops]
    tree, *_ = series_parallel_order(graph, weights)
    out: list[int | None] = [None] * graph.num_ops
    number = 0
    for block in tree.children if isinstance(tree, Series) else (tree,):
        for branch in block.children if isinstance(block, Parallel) else ():
            for op in bits(branch.mask):
                out[op] = number
            number += 1
    return tuple(out)


def signature(graph: OpGraph, mask: int, labels: Sequence[Hashable] | None = None) -> Hashable:
    """Everything that a planner can know about a set of operators, without names and numbers.

    Two disjoint sets of equal signature cost the same under the map of their operators in ascending
    order, so they share the planners' table entries.

    Args:
        labels: values that distinguish operators (their times, say); by default the amounts of `Op`.
    """
    rank = {op: i for i, op in enumerate(bits(mask))}
    out: list[Hashable] = []
    for op in rank:
        o = graph.ops[op]
        label = labels[op] if labels is not None else (o.kind, o.forward_flops, o.backward_flops, o.traffic_bytes, o.num_kernels)
        out.append((label, o.saved_bytes, tuple(_param_signature(graph, name, mask, rank) for name in o.params)))
    for t in (graph.tensors[i] for i in graph.touching(mask)):
        inside = tuple(rank[c] for c in t.consumers if c in rank)
        out.append((rank.get(t.producer), inside, len(inside) < len(t.consumers), t.bytes_per_sample, t.saved, t.differentiable))
    return tuple(out)


def _param_signature(graph: OpGraph, name: str, mask: int, rank: dict[int, int]) -> Hashable:
    readers = graph.readers[name]
    param = graph.param_of[name]
    if readers & ~mask:  # shared with the rest of the graph: only the very same parameter is the same
        return name
    return (param.num_bytes, param.trainable, param.gathered, rank[(readers & -readers).bit_length() - 1])
