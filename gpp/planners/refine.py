"""Hill-climbing on a finished plan, for graphs too large to list all partitions.

The dynamic program couples everything to one bottleneck and to the series-parallel structure. One
step from its best plan may still be better: an operator over a stage's border, two stages merged,
replicas from one stage to another, the next micro-batch size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gpp.graph.op_graph import OpGraph, bits
from gpp.planners.candidates import Candidate, Search
from gpp.planners.stage_costs import StageCosts

Stages = list[tuple[int, int]]

ENOUGH = 0.995
"""Climbing goes on while a step gains at least half a percent."""


def refine(search: Search, patience: int, *, order: Sequence[int] | None = None) -> None:
    """Improve the search's best plan step by step; every step simulates its neighbours by ascending bound.

    Args:
        patience: simulations without a better plan that end a step.
        order: stay with chains of intervals of this order of the operators; None for any stages.
    """
    costs, graph = search.assessor.costs, search.assessor.graph
    before = float("inf")
    while search.best is not None and search.best_s < ENOUGH * before:
        before, plan = search.best_s, search.best
        chained = order is not None or any(not tensors for tensors in plan.edge_tensors(graph).values())
        stages = [(sum(1 << op for op in stage.ops), len(stage.devices)) for stage in plan.stages]
        b = plan.stages[0].microbatch_size
        pool = set()
        for size, parts in _neighbours(costs, graph, b, stages, chained, order):
            candidate = search.assessor.assess(parts, size, chain=chained)
            if isinstance(candidate, Candidate) and search.worth(candidate.bound_s):
                pool.add(candidate)
        search.simulate_all(sorted(pool), patience)


def _neighbours(
    costs: StageCosts, graph: OpGraph, b: int, stages: Stages, chain: bool, order: Sequence[int] | None
) -> Iterator[tuple[int, Stages]]:
    """Plans one step away: (micro-batch size, stages)."""
    at = costs.microbatch_sizes.index(b)
    for size in costs.microbatch_sizes[max(0, at - 1) : at + 2]:
        if size != b and all(size % r == 0 for _, r in stages):
            yield size, stages
    for counts in _replica_moves(costs, b, [r for _, r in stages]):
        yield b, [(mask, r) for (mask, _), r in zip(stages, counts, strict=True)]
    spare = costs.cluster.num_devices - sum(r for _, r in stages)
    for p, q in _adjacent(graph, stages, chain):
        moves = _border_moves(graph, stages, p, q) if order is None else _interval_moves(order, stages, p)
        yield from ((b, moved) for moved in moves)
        merged = stages[p][1] + stages[q][1]
        allowed = [r for r in costs.replicas[b] if r <= merged + spare]
        for r in {max(allowed), max(r for r in allowed if r <= merged)}:
            # A merged stage stands where its first half stood; only neighbours of a chain are merged.
            yield b, [*stages[:p], (stages[p][0] | stages[q][0], r), *stages[p + 1 : q], *stages[q + 1 :]]


def _adjacent(graph: OpGraph, stages: Stages, chain: bool) -> Iterator[tuple[int, int]]:
    """Pairs of stages, in stage order, that share a border."""
    for p, (mask, _) in enumerate(stages):
        below = 0
        for op in bits(mask):
            below |= graph.successors[op]
        for q in range(p + 1, len(stages)):
            if q == p + 1 if chain else below & stages[q][0]:
                yield p, q


def _border_moves(graph: OpGraph, stages: Stages, p: int, q: int) -> Iterator[Stages]:
    """One operator from the end of stage p to stage q, or from the start of q to p."""
    (first, r), (second, s) = stages[p], stages[q]
    for op in bits(first):
        if not graph.successors[op] & first and first != 1 << op:
            moved = list(stages)
            moved[p], moved[q] = (first ^ 1 << op, r), (second | 1 << op, s)
            yield moved
    for op in bits(second):
        if not graph.predecessors[op] & second and second != 1 << op:
            moved = list(stages)
            moved[p], moved[q] = (first | 1 << op, r), (second ^ 1 << op, s)
            yield moved


def _interval_moves(order: Sequence[int], stages: Stages, p: int) -> Iterator[Stages]:
    """The border between intervals p and p + 1 of the order, one operator up or down."""
    (first, r), (second, s) = stages[p : p + 2]
    border = first.bit_count() + sum(mask.bit_count() for mask, _ in stages[:p])
    if first.bit_count() > 1:
        last = 1 << order[border - 1]
        yield [*stages[:p], (first ^ last, r), (second | last, s), *stages[p + 2 :]]
    if second.bit_count() > 1:
        following = 1 << order[border]
        yield [*stages[:p], (first | following, r), (second ^ following, s), *stages[p + 2 :]]


def _replica_moves(costs: StageCosts, b: int, counts: list[int]) -> Iterator[list[int]]:
    """One stage with more replicas, from idle devices or at one other stage's cost."""
    allowed = costs.replicas[b]
    for s, r in enumerate(counts):
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
