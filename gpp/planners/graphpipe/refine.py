"""Hill-climbing on finished plans, for graphs too large to list all partitions.

The dynamic program couples everything to one bottleneck and to one structure of the graph. A few steps from its best plans there
may still be a better one: operators over a stage's boundary, two stages merged, one split onto idle devices, replicas from
one stage to another, the next micro-batch size. Of large plans only the stages that hold the iteration up are touched.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gpp.graph.op_graph import OpGraph, bits
from gpp.plan.plan import Plan
from gpp.planners.common.candidates import Candidate, Search, Shortage
from gpp.planners.common.stage_costs import StageCosts

Stages = list[tuple[int, int]]

ENOUGH = 0.995
"""Climbing goes on while a step gains at least half a percent."""

ALL_STAGES = 8
"""Plans of at most so many stages are changed everywhere, larger ones where they are slowest."""

HOT = 0.9
"""Stages that alone hold an iteration up to this share of its bound count as slow."""


MAX_REPAIRS = 6
"""Changes of a partition that lacks memory."""

HOPELESS = 1.5
"""A partition that needs that many times the memory is left alone."""


def refine(search: Search, patience: int, *, order: Sequence[int] | None = None, starts: int = 1) -> None:
    """Improve the search's best plans step by step; every step simulates its neighbours by ascending bound.

    Args:
        patience: simulations without a better plan that end a step.
        order: stay with chains of intervals of this order of the operators; None for any stages.
        starts: hills to climb, one for each of the micro-batch sizes with the best plans.
    """
    for plan, seconds in search.best_by_size()[:starts]:
        _climb(search, plan, seconds, patience, order)


def _climb(search: Search, plan: Plan, seconds: float, patience: int, order: Sequence[int] | None) -> None:
    costs, graph = search.assessor.costs, search.assessor.graph
    before = float("inf")
    while seconds < ENOUGH * before:
        before = seconds
        chained = order is not None or any(not tensors for tensors in plan.edge_tensors(graph).values())
        stages = [(sum(1 << op for op in stage.ops), len(stage.devices)) for stage in plan.stages]
        b = plan.stages[0].microbatch_size
        hot = set(range(len(stages)))
        if len(stages) > ALL_STAGES:
            hot = search.assessor.slow_parts(stages, b, HOT, chain=chained)
        pool = set()
        for size, parts in _neighbours(costs, graph, b, stages, chained, order, hot):
            candidate = search.assessor.assess(parts, size, chain=chained)
            if isinstance(candidate, Candidate) and candidate.bound_s < seconds:
                pool.add(candidate)
        left = patience
        for candidate in sorted(pool):
            if left == 0 or candidate.bound_s >= seconds:
                break
            found = search.simulate(candidate, below_s=seconds)
            if found is None:
                continue
            left -= 1
            if found[1] < seconds:
                plan, seconds = found
                left = patience


def repair(search: Search, stages: Stages, b: int) -> None:
    """Change a partition that lacks memory step by step until it fits or no change lessens the lack; simulate it then."""
    assessor, graph = search.assessor, search.assessor.graph
    seen = assessor.assess(stages, b)
    for _ in range(MAX_REPAIRS):
        if not isinstance(seen, Shortage) or seen.scale > HOPELESS:
            return
        short = {s for s, (mask, _) in enumerate(stages) if mask in seen.lacking or len(stages) <= ALL_STAGES}
        best: tuple[float, Stages, Shortage] | None = None
        fitting: list[Candidate] = []
        for size, parts in _neighbours(assessor.costs, graph, b, stages, False, None, short):
            found = assessor.assess(parts, size)
            if isinstance(found, Candidate):
                fitting.append(found)
            elif found is not None and size == b and found.total < min(seen.total, best[0] if best else seen.total):
                best = found.total, parts, found
        if fitting:
            search.simulate_all(fitting, 2)
            return
        if best is None:
            return
        _, stages, seen = best


def _neighbours(
    costs: StageCosts,
    graph: OpGraph,
    b: int,
    stages: Stages,
    chain: bool,
    order: Sequence[int] | None,
    hot: set[int],
) -> Iterator[tuple[int, Stages]]:
    """Plans one step away: (micro-batch size, stages)."""
    at = costs.microbatch_sizes.index(b)
    for size in costs.microbatch_sizes[max(0, at - 1) : at + 2]:
        if size != b and all(size % r == 0 for _, r in stages):
            yield size, stages
    for counts in _replica_moves(costs, b, [r for _, r in stages], hot):
        yield b, [(mask, r) for (mask, _), r in zip(stages, counts, strict=True)]
    spare = costs.cluster.num_devices - sum(r for _, r in stages)
    for p, q in adjacent(graph, stages, chain):
        if p not in hot and q not in hot:
            continue
        moves = boundary_moves(graph, stages, p, q) if order is None else _interval_moves(order, stages, p)
        yield from ((b, moved) for moved in moves)
        merged = stages[p][1] + stages[q][1]
        allowed = [r for r in costs.replicas[b] if r <= merged + spare]
        for r in {max(allowed), max(r for r in allowed if r <= merged)}:
            # A merged stage stands where its first half stood; only neighbours of a chain are merged.
            yield b, [*stages[:p], (stages[p][0] | stages[q][0], r), *stages[p + 1 : q], *stages[q + 1 :]]
    if order is None and len(stages) < costs.cluster.num_devices:
        for p in sorted(hot):
            yield from ((b, split) for split in _splits(costs, graph, b, stages, p, spare))


def adjacent(graph: OpGraph, stages: Stages, chain: bool) -> Iterator[tuple[int, int]]:
    """Pairs of stages, in stage order, that share a boundary."""
    for p, (mask, _) in enumerate(stages):
        below = 0
        for op in bits(mask):
            below |= graph.successors[op]
        for q in range(p + 1, len(stages)):
            if q == p + 1 if chain else below & stages[q][0]:
                yield p, q


def boundary_moves(graph: OpGraph, stages: Stages, p: int, q: int) -> Iterator[Stages]:
    """Operators from the end of stage p to stage q, or from the start of q to p: any one, or the last or first few."""
    (first, r), (second, s) = stages[p], stages[q]

    def moved(chunk: int) -> Stages:
        out = list(stages)
        out[p], out[q] = (first ^ chunk, r), (second ^ chunk, s)
        return out

    for mask, forwards in ((first, True), (second, False)):
        blocking = graph.successors if forwards else graph.predecessors
        ops = list(bits(mask))
        ends = [1 << op for op in ops if not blocking[op] & mask]
        chunk, size = 0, 2
        for count, op in enumerate(reversed(ops) if forwards else ops, 1):
            chunk |= 1 << op
            if count == size:
                ends.append(chunk)
                size *= 2
        yield from (moved(chunk) for chunk in ends if chunk != mask)


def _interval_moves(order: Sequence[int], stages: Stages, p: int) -> Iterator[Stages]:
    """The boundary between intervals p and p + 1 of the order, one operator up or down."""
    (first, r), (second, s) = stages[p : p + 2]
    boundary = first.bit_count() + sum(mask.bit_count() for mask, _ in stages[:p])
    if first.bit_count() > 1:
        last = 1 << order[boundary - 1]
        yield [*stages[:p], (first ^ last, r), (second | last, s), *stages[p + 2 :]]
    if second.bit_count() > 1:
        following = 1 << order[boundary]
        yield [*stages[:p], (first | following, r), (second ^ following, s), *stages[p + 2 :]]


def _splits(costs: StageCosts, graph: OpGraph, b: int, stages: Stages, p: int, spare: int) -> Iterator[Stages]:
    """Stage p cut in two along the order of its operators, on its own devices and the idle ones."""
    mask, r = stages[p]
    ops = list(bits(mask))
    places = range(1, len(ops)) if len(ops) <= ALL_STAGES else [len(ops) * part // ALL_STAGES for part in range(1, ALL_STAGES)]
    allowed = costs.replicas[b]
    pairs = {(r, x) for x in allowed if x <= spare} | {(x, r) for x in allowed if x <= spare}
    pairs |= {(x, y) for x in allowed for y in allowed if x + y in (r, r + spare)}
    for place in places:
        head = sum(1 << op for op in ops[:place])
        for x, y in sorted(pairs):
            yield [*stages[:p], (head, x), (mask ^ head, y), *stages[p + 1 :]]


def _replica_moves(costs: StageCosts, b: int, counts: list[int], hot: set[int]) -> Iterator[list[int]]:
    """One stage with more replicas, from idle devices or at one other stage's cost; or with fewer."""
    allowed = costs.replicas[b]
    for s in sorted(hot):
        r = counts[s]
        less = next((x for x in reversed(allowed) if x < r), None)
        if less is not None:
            yield [*counts[:s], less, *counts[s + 1 :]]
        more = next((x for x in allowed if x > r), None)
        if more is None:
            continue
        larger = [*counts[:s], more, *counts[s + 1 :]]
        lack = sum(larger) - costs.cluster.num_devices
        if lack <= 0:
            yield larger
            continue
        for t, other in enumerate(larger):
            less = next((x for x in reversed(allowed) if x <= other - lack), None)
            if t != s and less is not None:
                yield [*larger[:t], less, *larger[t + 1 :]]
