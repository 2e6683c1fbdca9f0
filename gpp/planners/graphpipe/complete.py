"""Everything else in the graph planner's space, for problems small enough to list it: see `complete`."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

from gpp.graph.series_parallel import Order
from gpp.planners.common.candidates import Assessor, Candidate, Part, Parts, Shortage
from gpp.planners.common.incumbent import Incumbent
from gpp.planners.common.placement import Placement
from gpp.planners.graphpipe.sp_aligned import TooMany, partitions

NOTHING = (None,)
"""The verdict on a partition with a stage that alone takes too long."""

LISTED = 5
"""Candidates for each partition that is listed, at least, or there is no hope to judge them all."""


def complete(incumbent: Incumbent, orders: Sequence[Order], lines: Sequence[tuple[int, ...]], max_candidates: int) -> bool:
    """Judge every aligned partition and every chain with every device split, and simulate those that can win.

    Args:
        orders: series-parallel structures, whose aligned partitions are listed; lines: orders that are cut into intervals.
        max_candidates: partitions that may be listed, and candidates judged.

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
    left, best_first = max_candidates, [plan.stages[0].microbatch_size for plan, _ in incumbent.best_by_size()]
    for b in dict.fromkeys((*best_first, *costs.microbatch_sizes)):
        choices, hopeful = _choices(incumbent, itertools.chain.from_iterable((*aligned, *linear)), b)
        spaces: Iterator[tuple[tuple[int, ...], bool]] = itertools.chain(
            ((tuple(sorted(p)), False) for p in aligned if choices.keys() >= p),
            ((p, False) for p in linear if choices.keys() >= set(p) and frozenset(p) not in aligned),
            ((p, True) for p in linear if choices.keys() >= set(p)),
        )
        verdicts = (
            verdict
            for masks, chain in spaces
            for counts in _device_splits([choices[mask] for mask in masks], costs.cluster.num_devices)
            for parts in (tuple(zip(masks, counts, strict=True)),)
            for verdict in (
                everywhere(incumbent.assessor, parts, b, chain, incumbent.best_s) if hopeful.issuperset(parts) else NOTHING
            )
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


def _choices(incumbent: Incumbent, masks: Iterable[int], b: int) -> tuple[dict[int, list[int]], set[Part]]:
    """For each stage whose passes leave time its numbers of replicas that do, ascending; and the parts whose updates do, too.

    The others count as judged when they are listed.
    """
    assessor, stages = incumbent.assessor, dict.fromkeys(masks)
    costs = assessor.costs
    if not costs.cluster.homogeneous:
        every = list(costs.replicas[b])
        return dict.fromkeys(stages, every), set(itertools.product(stages, every))
    num_microbatches = costs.problem.minibatch_size // b
    found = {
        mask: [o.num_replicas for o in costs.options(mask, b) if incumbent.worth(num_microbatches * o.compute_s)] for mask in stages
    }
    hopeful = {(mask, r) for mask, counts in found.items() for r in counts if incumbent.worth(assessor.least_s(mask, r, b))}
    return {mask: counts for mask, counts in found.items() if counts}, hopeful


def _device_splits(choices: list[list[int]], num_devices: int) -> Iterator[tuple[int, ...]]:
    """Numbers of replicas of each stage that fit the cluster.

    Args:
        choices: of each stage, ascending.
    """
    spare = num_devices - sum(c[0] for c in choices)
    if spare < 0:
        return
    limited = [[r for r in c if r - c[0] <= spare] for c in choices]
    for counts in itertools.product(*limited):
        if sum(counts) <= num_devices:
            yield counts


def everywhere(
    assessor: Assessor, parts: Parts, microbatch_size: int, chain: bool, below_s: float
) -> Iterator[Candidate | Shortage | None]:
    """A partition's verdicts on all devices that differ in more than their names; on equal devices the placer's alone."""
    if assessor.cluster.homogeneous:
        yield assessor.assess(parts, microbatch_size, chain=chain, below_s=below_s)
        return
    classes: dict[tuple[int, int], list[int]] = {}
    for device, own in enumerate(assessor.placer.type_of):
        classes.setdefault((own, assessor.cluster.nodes[device]), []).append(device)
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
    """How many of each class, `count` in all."""
    if not room:
        if not count:
            yield ()
        return
    for n in range(min(count, room[0]), -1, -1):
        for rest in _selections(count - n, room[1:]):
            yield (n, *rest)
