"""Moves of the local search: functions from a plan to the plans one step away.

A move takes the surroundings (`Around`) and a point and yields points in a fixed order. It does not ask whether a point fits in
memory, has a cycle or could win: that is for whoever judges the points. A new move is a new function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from gpp.cost.problem import Problem
from gpp.graph.op_graph import OpGraph, bits, mask_of
from gpp.plan.build import make_plan
from gpp.plan.plan import Plan
from gpp.planners.common.candidates import Assessor, Part, Parts
from gpp.planners.common.placement import Placement
from gpp.planners.common.stage_costs import StageCosts
from gpp.stage import AbstractStageValue

FEW_OPS = 6
"""Operators at either end of a stage up to which any number may move together."""

EIGHTHS = 8
"""A stage of more operators is cut at multiples of an eighth of them only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A plan in the form that moves work on.

    Args:
        parts: operators and number of devices of each stage, in stage order.
        sizes: micro-batch size of each stage; ks: its k of kFkB.
        chain: whether every stage waits for the one before it, whatever the data.
        devices: the devices of each stage; None for the placer's choice.
    """

    parts: Parts
    sizes: tuple[int, ...]
    ks: tuple[int, ...]
    chain: bool
    devices: Placement | None = None

    @classmethod
    def of(cls, plan: Plan, graph: OpGraph) -> Point:
        """The point of a plan, on the plan's devices."""
        return cls(
            parts=tuple((mask_of(stage.ops), len(stage.devices)) for stage in plan.stages),
            sizes=tuple(stage.microbatch_size for stage in plan.stages),
            ks=tuple(stage.k for stage in plan.stages),
            chain=is_chain(plan, graph),
            devices=tuple(stage.devices for stage in plan.stages),
        )

    def plan(self, problem: Problem, planner: str, sharing: Sequence[AbstractStageValue | None] | None = None) -> Plan:
        """The plan of this point.

        Args:
            planner, sharing: as `make_plan` has them.

        Raises:
            InvalidPlan: the stages form a cycle, or have no place.
        """
        return make_plan(
            problem,
            planner,
            self.parts,
            self.sizes,
            k=self.ks,
            chain=self.chain,
            ordered=True,
            placement=self.devices,
            sharing=sharing,
        )


def is_chain(plan: Plan, graph: OpGraph) -> bool:
    """Whether a plan has order edges."""
    return any(not tensors for tensors in plan.edge_tensors(graph).values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Around:
    """Everything that a move may look at beside the point.

    Args:
        hot: stages that hold the iteration up; others are changed only together with one of these.
        order: a linear order of the operators of which all stages stay intervals; None for stages of any shape.
    """

    assessor: Assessor
    hot: frozenset[int]
    order: Sequence[int] | None = None

    @property
    def graph(self) -> OpGraph:
        return self.assessor.graph

    def idle(self, point: Point) -> int:
        """Devices that no stage has."""
        return self.assessor.cluster.num_devices - sum(count for _, count in point.parts)

    def replicas(self, size: int) -> tuple[int, ...]:
        """Numbers of replicas that a stage with this micro-batch size may have, ascending."""
        return self.assessor.costs.replicas[size]


Move = Callable[[Around, Point], Iterator[Point]]


def sizes(around: Around, point: Point) -> Iterator[Point]:
    """All stages with the next smaller or larger micro-batch size that their replicas divide."""
    b = point.sizes[0]
    every = [b for b in around.assessor.costs.microbatch_sizes if all(b % count == 0 for _, count in point.parts)]
    at = every.index(b)
    for size in every[max(0, at - 1) : at + 2]:
        if size != b:
            yield replace(point, sizes=(size,) * len(point.sizes))


def replicas(around: Around, point: Point) -> Iterator[Point]:
    """A stage with more replicas, from idle devices or at one other stage's cost; or with fewer."""
    counts, idle, allowed = [count for _, count in point.parts], around.idle(point), around.replicas(point.sizes[0])
    for s in sorted(around.hot):
        r = counts[s]
        less = next((x for x in reversed(allowed) if x < r), None)
        if less is not None:
            yield _with_counts(point, {s: less})
        more = next((x for x in allowed if x > r), None)
        if more is None:
            continue
        lack = more - r - idle
        if lack <= 0:
            yield _with_counts(point, {s: more})
            continue
        for t, other in enumerate(counts):
            less = next((x for x in reversed(allowed) if x <= other - lack), None)
            if t != s and less is not None:
                yield _with_counts(point, {s: more, t: less})


def _with_counts(point: Point, counts: dict[int, int]) -> Point:
    parts = list(point.parts)
    for s, count in counts.items():
        parts[s] = parts[s][0], count
    return replace(point, parts=tuple(parts))


def boundaries(around: Around, point: Point) -> Iterator[Point]:
    """Operators moved over the boundary of two neighbouring stages."""
    for p, q in neighbours(around, point):
        if around.order is not None:
            yield from _interval_boundary(around.order, point, p)
        else:
            yield from border_moves(around.graph, point, p, q)


def merges(around: Around, point: Point) -> Iterator[Point]:
    """Two neighbouring stages as one, on as many devices as they had or on the idle ones too."""
    allowed, idle = around.replicas(point.sizes[0]), around.idle(point)
    for p, q in neighbours(around, point):
        (first, r), (second, s) = point.parts[p], point.parts[q]
        for count in sorted({max(x for x in allowed if x <= r + s + idle), max(x for x in allowed if x <= r + s)}):
            parts = (*point.parts[:p], (first | second, count), *point.parts[p + 1 : q], *point.parts[q + 1 :])
            # A merged stage stands where its first half stood; only neighbours of a chain are merged.
            yield replace(point, parts=parts, sizes=point.sizes[1:], ks=point.ks[1:])


def splits(around: Around, point: Point) -> Iterator[Point]:
    """A stage cut in two along the order of its operators, on its own devices and the idle ones."""
    allowed, idle = around.replicas(point.sizes[0]), around.idle(point)
    if len(point.parts) >= around.assessor.cluster.num_devices:
        return
    for p in sorted(around.hot):
        mask, r = point.parts[p]
        pairs = {(r, x) for x in allowed if x <= idle} | {(x, r) for x in allowed if x <= idle}
        pairs |= {(x, y) for x in allowed for y in allowed if x + y in (r, r + idle)}
        for head in heads(mask):
            for x, y in sorted(pairs):
                parts = (*point.parts[:p], (head, x), (mask ^ head, y), *point.parts[p + 1 :])
                yield replace(point, parts=parts, sizes=(point.sizes[0], *point.sizes), ks=(point.ks[0], *point.ks))


def splits_alike(around: Around, point: Point) -> Iterator[Point]:
    """All equally long stages cut in two at once, on their own devices and idle ones.

    Equal branches hold an iteration up together: cut one by one, they gain nothing until the last one is cut.
    """
    costs, b, idle = around.assessor.costs, point.sizes[0], around.idle(point)
    if point.chain:
        return
    alike: dict[tuple[int, float], list[int]] = {}
    for p, (mask, r) in enumerate(point.parts):
        if mask & (mask - 1):
            alike.setdefault((r, float(f"{costs.compute_s(mask, b // r):.6g}")), []).append(p)
    for (r, _), stages in alike.items():
        if len(stages) > 1 and len(stages) * r <= idle and around.hot.intersection(stages):
            parts: list[Part] = []
            for p, (mask, _) in enumerate(point.parts):
                parts += ((half, r) for half in halves(costs, mask, b // r)) if p in stages else (point.parts[p],)
            more = len(parts) - len(point.parts)
            yield replace(
                point, parts=tuple(parts), sizes=(b,) * more + point.sizes, ks=(point.ks[0],) * more + point.ks, devices=None
            )


def halves(costs: StageCosts, mask: int, samples: int) -> tuple[int, int]:
    """A stage of several operators in two: its unconnected parts dealt out, or the first half of its operators and the rest."""
    pieces = connected(costs.graph, mask)
    if len(pieces) == 1:
        ops, half = list(bits(mask)), 0
        while half.bit_count() < len(ops) - 1 and 2 * costs.compute_s(half, samples) < costs.compute_s(mask, samples):
            half |= 1 << ops[half.bit_count()]
        return half, mask & ~half
    out, loads = [0, 0], [0.0, 0.0]
    for piece in sorted(pieces, key=lambda piece: -costs.compute_s(piece, samples)):
        lighter = loads.index(min(loads))
        out[lighter] |= piece
        loads[lighter] += costs.compute_s(piece, samples)
    return out[0], out[1]


def connected(graph: OpGraph, mask: int) -> list[int]:
    """Parts of a set that no tensor inside it connects."""
    out, rest = [], mask
    while rest:
        piece, frontier = 0, rest & -rest
        while frontier:
            piece |= frontier
            near = 0
            for op in bits(frontier):
                near |= graph.successors[op] | graph.predecessors[op]
            frontier = near & mask & ~piece
        out.append(piece)
        rest &= ~piece
    return out


def heads(mask: int) -> Iterator[int]:
    """The first operators of a stage, by number: any few of a small stage, eighths of a large one."""
    ops = list(bits(mask))
    places = range(1, len(ops)) if len(ops) <= EIGHTHS else [len(ops) * part // EIGHTHS for part in range(1, EIGHTHS)]
    for place in places:
        yield mask_of(ops[:place])


def neighbours(around: Around, point: Point) -> Iterator[tuple[int, int]]:
    """Pairs of stages, in stage order, that share a boundary; at least one of them holds the iteration up."""
    for p, q in adjacent(around.graph, point.parts, point.chain):
        if p in around.hot or q in around.hot:
            yield p, q


def adjacent(graph: OpGraph, parts: Sequence[Part], chain: bool) -> Iterator[tuple[int, int]]:
    """Pairs of stages, in stage order, that share a boundary."""
    for p, (mask, _) in enumerate(parts):
        below = 0
        if not chain:
            for op in bits(mask):
                below |= graph.successors[op]
        for q in range(p + 1, len(parts)):
            if q == p + 1 if chain else below & parts[q][0]:
                yield p, q


def border_moves(graph: OpGraph, point: Point, p: int, q: int, few: int = 1) -> Iterator[Point]:
    """Operators from the end of stage p to stage q, or from the start of q to p: any one, or the last or first few.

    Args:
        few: any number of them up to this, beyond it powers of two.
    """
    for mask, forwards in ((point.parts[p][0], True), (point.parts[q][0], False)):
        blocking = graph.successors if forwards else graph.predecessors
        ops = list(bits(mask))
        ends = [1 << op for op in ops if not blocking[op] & mask]
        chunk, size = 0, 2
        for count, op in enumerate(reversed(ops) if forwards else ops, 1):
            chunk |= 1 << op
            if count == size or 1 < count <= few:
                ends.append(chunk)
                size *= 2 if count == size else 1
        yield from (_moved(point, p, q, chunk) for chunk in ends if chunk != mask)


def _interval_boundary(order: Sequence[int], point: Point, p: int) -> Iterator[Point]:
    """The boundary between intervals p and p + 1 of the order, one operator up or down."""
    first, second = point.parts[p][0], point.parts[p + 1][0]
    boundary = first.bit_count() + sum(mask.bit_count() for mask, _ in point.parts[:p])
    if first.bit_count() > 1:
        yield _moved(point, p, p + 1, 1 << order[boundary - 1])
    if second.bit_count() > 1:
        yield _moved(point, p, p + 1, 1 << order[boundary])


def _moved(point: Point, p: int, q: int, chunk: int) -> Point:
    """The point with operators of one stage moved to the other."""
    (first, r), (second, s) = point.parts[p], point.parts[q]
    parts = list(point.parts)
    parts[p], parts[q] = (first ^ chunk, r), (second ^ chunk, s)
    return replace(point, parts=tuple(parts))


ANY_STAGES: tuple[Move, ...] = (sizes, replicas, boundaries, merges, splits, splits_alike)
"""The moves of plans of any stages on equal devices with one micro-batch size."""

CHAINS: tuple[Move, ...] = (sizes, replicas, boundaries, merges)
"""Those of chains of intervals of a linear order."""
