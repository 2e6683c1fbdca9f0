"""Everything else in the graph planner's space, for problems small enough to list it: see `complete`."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

from gpp.graph.series_parallel import Order
from gpp.planners.common.candidates import Assessor, Candidate, Parts, Shortage
from gpp.planners.common.incumbent import Incumbent
from gpp.planners.common.placement import Placement
from gpp.planners.graphpipe.sp_aligned import TooMany, partitions

LISTED = 5
"""Candidates for each partition that is listed, at least, or there is no hope to judge them all."""

JUDGED = 20
"""Listed ones for each that is judged: what could win is a small part of the space, or else the bound says too little of it."""


def complete(incumbent: Incumbent, orders: Sequence[Order], lines: Sequence[tuple[int, ...]], max_candidates: int) -> bool:
    """Judge every aligned partition and every chain with every device split, and simulate those that can win.

    Args:
        orders: series-parallel structures, whose aligned partitions are listed; lines: orders that are cut into intervals.
        max_candidates: partitions that may be listed, and `JUDGED` times the candidates that are judged.

    Returns:
        False if that was too much; what was judged until then is simulated, the best micro-batch sizes first.
    """
    costs, graph = incumbent.assessor.costs, incumbent.assessor.graph
    if 2 ** (graph.num_ops - 1) > max_candidates:  # as many chains alone
        return False
    try:
        aligned = {p: None for order in orders for p in partitions(order, graph.all_mask, max_candidates // LISTED)}
    except TooMany:
        return False
    linear = list(_intervals(lines[0]))
    for line in lines[1:]:
        aligned |= dict.fromkeys(frozenset(p) for p in _intervals(line))
    left, best_first = max_candidates // JUDGED, [plan.stages[0].microbatch_size for plan, _ in incumbent.best_by_size()]
    for b in dict.fromkeys((*best_first, *costs.microbatch_sizes)):
        choices = _choices(incumbent, itertools.chain.from_iterable((*aligned, *linear)), b)
        spaces: Iterator[tuple[tuple[int, ...], bool]] = itertools.chain(
            ((tuple(sorted(p)), False) for p in aligned if choices.keys() >= p),
            ((p, False) for p in linear if choices.keys() >= set(p) and frozenset(p) not in aligned),
            ((p, True) for p in linear if choices.keys() >= set(p)),
        )
        verdicts = (
            verdict
            for masks, chain in spaces
            for parts in _device_splits(incumbent, masks, choices, b, chain)
            for verdict in everywhere(incumbent.assessor, parts, b, chain, incumbent.best_s)
        )
        pool = []
        for verdict in itertools.islice(verdicts, left + 1):
            left -= 1
            if isinstance(verdict, Candidate):
                pool.append(verdict)
        incumbent.simulate_all(pool)
        if left < 0:
            return False
    return True


def _intervals(order: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """All ways to cut a linear order into intervals, as tuples of masks in order."""
    n = len(order)
    for cuts in itertools.chain.from_iterable(itertools.combinations(range(1, n), k) for k in range(n)):
        ends = (0, *cuts, n)
        yield tuple(sum(1 << op for op in order[i:j]) for i, j in itertools.pairwise(ends))


def _choices(incumbent: Incumbent, masks: Iterable[int], b: int) -> dict[int, list[tuple[int, float]]]:
    """For each stage that alone could win its numbers of replicas with which it could, ascending.

    With each the least seconds of both passes of a micro-batch; nothing is said of them on unequal devices.
    """
    assessor, stages = incumbent.assessor, dict.fromkeys(masks)
    costs = assessor.costs
    if not costs.cluster.homogeneous:
        every = [(r, 0.0) for r in costs.replicas[b]]
        return dict.fromkeys(stages, every)
    num_microbatches = costs.problem.minibatch_size // b
    found = {
        mask: [
            (o.num_replicas, o.compute_s)
            for o in costs.options(mask, b)
            if incumbent.worth(num_microbatches * o.compute_s) and incumbent.worth(assessor.least_s(mask, o.num_replicas, b))
        ]
        for mask in stages
    }
    return {mask: counts for mask, counts in found.items() if counts}


def _device_splits(
    incumbent: Incumbent, masks: Sequence[int], choices: dict[int, list[tuple[int, float]]], b: int, chain: bool
) -> Iterator[Parts]:
    """A partition with numbers of replicas of each stage that fit the cluster, and could win.

    They are chosen from the first stage on. No step is shorter than the way to a stage and all its micro-batches
    (`Assessor.assess`, which counts messages and updates too), so a choice that cannot win ends all that begin like it.
    """
    assessor, problem = incumbent.assessor, incumbent.assessor.problem
    arranged = assessor.arranged([(mask, 1) for mask in masks], chain)
    if arranged is None:
        return
    ordered, nexts, _ = arranged
    options, count = [choices[mask] for mask, _ in ordered], problem.minibatch_size // b
    drains, place = problem.regime.minibatches == 1, {mask: s for s, (mask, _) in enumerate(ordered)}
    rest = [0]  # devices that the stages behind need at least
    for option in reversed(options):
        rest.append(rest[-1] + option[0][0])
    rest.reverse()

    def choose(chosen: tuple[int, ...], left: int, ways: tuple[float, ...]) -> Iterator[tuple[int, ...]]:
        s = len(chosen)
        if s == len(options):
            yield chosen
            return
        for r, took in options[s]:
            if r > left - rest[s + 1]:
                break
            if not incumbent.worth(ways[s] + count * took):
                continue
            after = list(ways)
            for t in nexts[s] if drains else ():
                after[t] = max(after[t], ways[s] + took)
            yield from choose((*chosen, r), left - r, tuple(after))

    for counts in choose((), assessor.cluster.num_devices, (0.0,) * len(options)):
        yield tuple((mask, counts[place[mask]]) for mask in masks)


def everywhere(
    assessor: Assessor, parts: Parts, microbatch_size: int, chain: bool, below_s: float
) -> Iterator[Candidate | Shortage | None]:
    """A partition's verdicts on all devices that differ in more than their names; on equal devices the placer's alone."""
    if assessor.cluster.homogeneous:
        yield assessor.assess(parts, microbatch_size, chain=chain, below_s=below_s)
        return
    classes: dict[tuple[int, int], list[int]] = {}
    for device, own in enumerate(assessor.placer.type_of):
        classes.setdefault((own, assessor.cluster.wiring.places[device]), []).append(device)
    members = list(classes.values())

    def deal(taken: tuple[int, ...], placed: Placement) -> Iterator[Placement]:
        if len(placed) == len(parts):
            yield placed
            return
        for chosen in _selections(parts[len(placed)][1], [len(m) - t for m, t in zip(members, taken, strict=True)]):
            devices = sorted(d for m, t, n in zip(members, taken, chosen, strict=True) for d in m[t : t + n])
            yield from deal(tuple(t + n for t, n in zip(taken, chosen, strict=True)), (*placed, tuple(devices)))

    for placed in deal((0,) * len(members), ()):
        yield assessor.assess(parts, microbatch_size, chain=chain, placement=placed, below_s=below_s)


def _selections(count: int, room: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """The numbers of members of each class, `count` in all."""
    if not room:
        if not count:
            yield ()
        return
    for n in range(min(count, room[0]), -1, -1):
        for rest in _selections(count - n, room[1:]):
            yield (n, *rest)
