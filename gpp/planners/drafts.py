"""Drafts: finished partitions from the dynamic program, for the micro-batch sizes and bottlenecks that are worth it.

An iteration takes about M t for M micro-batches and a bottleneck t, and the way of one micro-batch through the pipeline: (h - 1) t
at depth h (GraphPipe, section 3), but never more than the longest path through the graph. So every row of the dynamic
program's table is worth a number before anything is laid out. A first scan takes a few limits of every micro-batch
size; then the most promising sizes get the bottlenecks that are attainable: the times of the stages that exist.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from gpp.cost.problem import Problem
from gpp.graph.op_graph import bits
from gpp.planners.candidates import Assessor, Candidate
from gpp.planners.partition_search import Lanes, Parts, PartitionSearch, Solved
from gpp.planners.skeleton import Chain
from gpp.planners.stage_costs import StageCosts

SCAN = (1.001, 1.06, 1.15, 1.3, 1.5, 1.8, 2.3, 3.0, 5.0)
"""Limits of the first scan, in units of the least possible bottleneck."""

ZOOM = 12
"""Attainable bottlenecks of the second scan, for each of the best sizes."""

BEST_SIZES = 3
"""Micro-batch sizes of the second scan."""

DRAFTS = 12
"""Layouts that are read out of a table, by their estimate; as many for each of the best sizes as fit into that."""

SPARE = 1.15
"""Layouts may have that many times the devices, and two more: light stages are merged afterwards."""


class Row(NamedTuple):
    """A row of the table: about how long an iteration takes, and where it stands."""

    estimate_s: float
    lane: int
    h: int


def drafts(search: PartitionSearch, assessor: Assessor) -> list[Candidate]:
    """Candidates by the two scans, judged on their own devices; those that do not fit are left out."""
    costs = search.costs
    floor = {b: bottleneck_floor(costs, b) for b in costs.microbatch_sizes}
    minibatch_size = costs.problem.minibatch_size
    least = min(minibatch_size // b * t for b, t in floor.items())
    sizes = [b for b, t in floor.items() if minibatch_size // b * t <= 3 * least or len(floor) < 4]
    scan = _lanes({b: [floor[b] * f for f in SCAN] for b in sizes})
    first = search.solve(scan)
    rows = _rows(first, scan, search)
    best: dict[int, Row] = {}
    for row in rows:
        best.setdefault(int(scan.sizes[row.lane]), row)
    out: dict[tuple, Candidate] = {}
    chosen = sorted(best, key=lambda b: best[b])[:BEST_SIZES]
    if chosen:
        zoom = _lanes({b: _attainable(search, b, floor[b], scan.limits_s[best[b].lane]) for b in chosen})
        second = search.solve(zoom)
        for solved, lanes, found in ((second, zoom, _rows(second, zoom, search)), (first, scan, rows)):
            for parts, b in _laid_out(solved, lanes, found, costs):
                candidate = assessor.assess(parts, b)
                if isinstance(candidate, Candidate):
                    out.setdefault((b, candidate.parts), candidate)
    return list(out.values())


def bottleneck_floor(costs: StageCosts, b: int) -> float:
    """No partition has a faster slowest stage: all devices always busy; the slowest operator alone."""
    every = costs.graph.all_mask
    spread = costs.least_work_s(every, b) / costs.cluster.num_devices
    rows = [costs.row(b // r) for r in costs.replicas[b]]
    alone = (costs.forward_s[rows] + costs.backward_s[rows]).min(axis=0).max()
    return max(spread, float(alone))


def _lanes(limits: dict[int, list[float]]) -> Lanes:
    pairs = [(b, limit) for b, many in limits.items() for limit in many]
    return Lanes(np.array([b for b, _ in pairs]), np.array([limit for _, limit in pairs]))


def _rows(solved: Solved, lanes: Lanes, search: PartitionSearch) -> list[Row]:
    """Feasible rows by ascending estimate."""
    devices = solved.devices[0]
    corner = devices[:, 1:] < devices[:, :-1]
    fits = devices[:, 1:] <= search.num_devices * SPARE + 2
    most = search.costs.problem.minibatch_size // lanes.sizes
    longest = {b: _longest_path_s(search.costs, b) for b in set(lanes.sizes.tolist())}
    out = []
    for lane, h in np.argwhere(corner & fits).tolist():
        over = max(0, int(devices[lane, h + 1]) - search.num_devices)
        limit_s = float(lanes.limits_s[lane])
        way_s = min(h * limit_s, longest[int(lanes.sizes[lane])])
        out.append(Row((float(most[lane]) * limit_s + way_s) * (1 + 0.02 * over), lane, h + 1))
    return sorted(out)


def _longest_path_s(costs: StageCosts, b: int) -> float:
    """Both passes of one micro-batch along the heaviest path, unreplicated."""
    row = costs.row(b)
    took, ends = (costs.forward_s[row] + costs.backward_s[row]).tolist(), [0.0] * costs.graph.num_ops
    for op in range(costs.graph.num_ops):
        ends[op] = took[op] + max((ends[prev] for prev in bits(costs.graph.predecessors[op])), default=0.0)
    return max(ends)


def _attainable(search: PartitionSearch, b: int, floor_s: float, feasible_s: float) -> list[float]:
    """Times of existing stages between the floor and a bit above a feasible limit, evenly taken from all of them."""
    found: set[float] = set()

    def collect(chain: Chain) -> None:
        for r in search.costs.replicas[b]:
            seconds = search.stage_s(chain, b, r)
            found.update(seconds[(seconds >= floor_s) & (seconds <= 1.5 * feasible_s)].tolist())
        for block in chain.blocks.values():
            for branch in block.chains:
                collect(branch)

    collect(search.skeleton.root)
    values = sorted(found)
    picks = np.unique(np.linspace(0, len(values) - 1, ZOOM).astype(int)) if values else []
    return [values[i] * (1 + 1e-9) for i in picks] or [feasible_s]


def _laid_out(solved: Solved, lanes: Lanes, rows: list[Row], costs: StageCosts) -> Iterator[tuple[Parts, int]]:
    """Partitions of the best rows, light stages merged: (parts, micro-batch size)."""
    taken: dict[int, int] = {}
    for row in rows:
        b = int(lanes.sizes[row.lane])
        if taken.get(b, 0) * BEST_SIZES >= DRAFTS:
            continue
        parts, _ = solved.parts(row.lane, row.h)
        merged = merge_light(costs, parts, b, float(lanes.limits_s[row.lane]))
        for each in (merged, parts) if len(merged) < len(parts) else (parts,):
            if sum(r for _, r in each) <= costs.cluster.num_devices:
                taken[b] = taken.get(b, 0) + 1
                yield each, b


def merge_light(costs: StageCosts, parts: Parts, b: int, limit_s: float) -> Parts:
    """Merge neighbours on one device each while both together stay below the limit: a join with a branch's end, a fork with a head.

    The lightest pair goes first. What the merge costs in concurrency is for the judgement of the candidate to say.
    """
    graph, parts = costs.graph, list(parts)
    seconds = [costs.compute_s(mask, b) if r == 1 else np.inf for mask, r in parts]
    below = [_below(graph.successors, mask) for mask, _ in parts]
    while True:
        pairs = [
            (seconds[p] + seconds[q], p, q)
            for p in range(len(parts))
            if seconds[p] < limit_s
            for q in range(len(parts))
            if p != q and below[p] & parts[q][0] and seconds[p] + seconds[q] <= limit_s * 1.01
        ]
        for total, p, q in sorted(pairs):
            union = parts[p][0] | parts[q][0]
            if graph.is_convex(union):
                low, high = min(p, q), max(p, q)
                parts[low], seconds[low], below[low] = (union, 1), total, below[p] | below[q]
                del parts[high], seconds[high], below[high]
                break
        else:
            return parts


def _below(successors: tuple[int, ...], mask: int) -> int:
    out = 0
    for op in bits(mask):
        out |= successors[op]
    return out


def any_that_fits(search: PartitionSearch, assessor: Assessor) -> Candidate | None:
    """Some candidate that fits in memory, however slow; None if the search finds none."""
    sizes = sizes_that_save_memory(search.costs.problem)
    lanes = _lanes({b: [np.inf] for b in sizes})
    solved = search.solve(lanes)
    for lane, h in np.argwhere(solved.devices[0] <= search.num_devices).tolist():
        candidate = assessor.assess(solved.parts(lane, h)[0], int(lanes.sizes[lane]))
        if isinstance(candidate, Candidate):
            return candidate
    return None


def sizes_that_save_memory(problem: Problem) -> list[int]:
    """Micro-batch sizes outside of which nothing fits if nothing fits inside.

    One sample at a time on unreplicated stages keeps least, unless the mini-batch has fewer
    micro-batches than a pipeline may be deep: then replicas share fewer samples.
    """
    sizes = problem.microbatch_sizes()
    deepest = min(problem.cluster.num_devices, problem.graph.num_ops)
    return [b for b in sizes if b == sizes[0] or problem.in_flight == "all" or problem.minibatch_size // b < deepest]
