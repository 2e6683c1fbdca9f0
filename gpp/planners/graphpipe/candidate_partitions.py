"""Candidate partitions: finished ones from the dynamic program, for the micro-batch sizes and bottlenecks that are worth it.

An iteration takes about M t for M micro-batches and a bottleneck t, and the way of one micro-batch through the pipeline: (h - 1) t
at depth h (GraphPipe, section 3), but never more than the longest path through the graph. So every row of the dynamic
program's table is worth a number before anything is laid out. A first scan takes a few limits of every micro-batch
size; then the most promising sizes get the bottlenecks that are attainable: the times of the stages that exist.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from gpp.cost.problem import Problem
from gpp.graph.op_graph import bits
from gpp.planners.common.candidates import Assessor, Candidate, Parts, Shortage
from gpp.planners.common.stage_costs import StageCosts
from gpp.planners.graphpipe.partition_search import PartitionSearch, Solved
from gpp.planners.graphpipe.sp_structure import SeriesChain
from gpp.planners.graphpipe.stage_tables import Lanes

SCAN = (1.001, 1.06, 1.15, 1.3, 1.5, 1.8, 2.3, 3.0, 5.0)
"""Limits of the first scan, in units of the least possible bottleneck."""

ROUNDS = 3
"""Times that the brackets around the smallest feasible bottlenecks are narrowed."""

INSIDE = 3
"""Attainable bottlenecks that are tried inside a bracket in each round."""

MOST_INSIDE = 18
"""Bottlenecks that are tried in all brackets of a micro-batch size, in each round."""

BEST_SIZES = 5
"""Micro-batch sizes whose brackets are narrowed."""

LAYOUTS = 5
"""Layouts of each of these sizes, by their estimate."""

SPARE = 1.15
"""Layouts may have that many times the devices, and two more: light stages are merged afterwards."""


FAR = 1.3
"""Rows estimated above the best plan by this factor are not worth their layout."""

TOGETHER = 1.1
"""Two stages may be merged into one that takes that many times the limit: a device less to spend may be worth it."""


NO_LIMIT = 1e30
"""Seconds; stages that do not exist take infinitely long, so this must stay below."""


class PartitionRow(NamedTuple):
    """A row of a table: about how long an iteration takes, the table, where it stands there, and what its lane is for."""

    estimate_s: float
    table: int
    lane: int
    h: int
    microbatch_size: int
    limit_s: float


class _SolvedLanes:
    """Every lane solved so far."""

    def __init__(self, search: PartitionSearch) -> None:
        self.search, self.costs = search, search.costs
        self.solved: list[tuple[Lanes, Solved]] = []
        self._longest: dict[int, float] = {}

    def solve(self, limits: dict[int, list[float]]) -> None:
        """Limits by micro-batch size."""
        pairs = [(b, limit) for b, many in limits.items() for limit in many]
        if pairs:
            lanes = Lanes(np.array([b for b, _ in pairs]), np.array([limit for _, limit in pairs]))
            self.solved.append((lanes, self.search.solve(lanes)))

    def rows(self, spare: bool) -> list[PartitionRow]:
        """For every micro-batch size, depth and number of devices the row with the smallest limit, by ascending estimate.

        Args:
            spare: of layouts with a few devices too many.
        """
        least: dict[tuple[int, int, int], tuple[float, int, int]] = {}
        have = self.search.num_devices
        for t, (lanes, solved) in enumerate(self.solved):
            devices = solved.devices[0]
            fits = devices[:, 1:] <= have if not spare else (devices[:, 1:] > have) & (devices[:, 1:] <= have * SPARE + 2)
            for lane, h in np.argwhere(fits & (devices[:, 1:] < devices[:, :-1])).tolist():
                key = int(lanes.sizes[lane]), h + 1, int(devices[lane, h + 1])
                entry = float(lanes.limits_s[lane]), t, lane
                if key not in least or entry < least[key]:
                    least[key] = entry
        rows = []
        for (b, h, _), (limit_s, t, lane) in least.items():
            way_s = min((h - 1) * limit_s, self.longest_s(b))
            rows.append(PartitionRow(self.costs.problem.minibatch_size // b * limit_s + way_s, t, lane, h, b, limit_s))
        return sorted(rows)

    def brackets(self, b: int, floor_s: float) -> list[tuple[float, float]]:
        """(largest infeasible, smallest feasible) limit of every depth at which a smaller one becomes feasible."""
        limits = np.concatenate([lanes.limits_s[lanes.sizes == b] for lanes, _ in self.solved])
        devices = np.concatenate([solved.devices[0][lanes.sizes == b] for lanes, solved in self.solved])
        order = np.argsort(limits, kind="stable")
        limits, fits = limits[order], devices[order] <= self.search.num_devices
        out, last = [], np.inf
        for h in range(1, fits.shape[1]):
            if fits[:, h].any():
                first = int(fits[:, h].argmax())
                if limits[first] < last:
                    last = float(limits[first])
                    out.append((float(limits[first - 1]) if first else floor_s, last))
        return out

    def longest_s(self, b: int) -> float:
        """Both passes of one micro-batch along the heaviest path, unreplicated."""
        if b not in self._longest:
            row, graph = self.costs.row(b), self.costs.graph
            took, ends = (self.costs.forward_s[row] + self.costs.backward_s[row]).tolist(), [0.0] * graph.num_ops
            for op in range(graph.num_ops):
                ends[op] = took[op] + max((ends[prev] for prev in bits(graph.predecessors[op])), default=0.0)
            self._longest[b] = max(ends)
        return self._longest[b]


class CandidatePartitions(NamedTuple):
    """The candidates of the most promising rows, and the least estimate of those that lack memory; infinity where all fit."""

    fitting: list[Candidate]
    lacking_s: float


def candidate_partitions(search: PartitionSearch, assessor: Assessor, best_s: float = float("inf")) -> CandidatePartitions:
    """The most promising rows, judged on their own devices.

    Args:
        best_s: a plan that is known; rows estimated far above it are left alone.
    """
    costs, tables = search.costs, _SolvedLanes(search)
    floor = {b: bottleneck_floor(costs, b) for b in costs.microbatch_sizes}
    minibatch_size = costs.problem.minibatch_size
    least = min(minibatch_size // b * t for b, t in floor.items())
    likely = [b for b, t in floor.items() if minibatch_size // b * t <= 3 * least or len(floor) < 4]
    tables.solve({b: [floor[b] * f for f in SCAN] for b in likely})
    out: dict[tuple, Candidate] = {}
    lacking_s = math.inf
    tried: set[int] = set()
    while True:
        chosen = _narrowed(tables, floor, tried, FAR * best_s)
        tried.update(chosen)
        short = set(chosen)
        for estimate_s, parts, b in _laid_out(tables, chosen, FAR * best_s):
            candidate = assessor.assess(parts, b)
            if isinstance(candidate, Shortage):
                lacking_s = min(lacking_s, estimate_s)
            elif candidate is not None:
                out.setdefault((b, candidate.parts), candidate)
                short.discard(b)
        # Sizes at which nothing fits must not stand in the way of smaller ones.
        if not short or not any(b < max(short) and b not in tried for b in floor):
            return CandidatePartitions(list(out.values()), lacking_s)
        tables.solve({b: [floor[b] * f for f in SCAN] for b in floor if b < max(short) and b not in (*tried, *likely)})
        likely += [b for b in floor if b < max(short)]


def _narrowed(tables: _SolvedLanes, floor: dict[int, float], tried: set[int], below_s: float) -> list[int]:
    """The most promising sizes that were not tried, with their brackets narrowed down."""
    attainable: dict[int, np.ndarray] = {}
    chosen: list[int] = []
    for _ in range(ROUNDS):
        promising = (row.microbatch_size for row in tables.rows(spare=False) if row.estimate_s < below_s)
        chosen = [b for b in dict.fromkeys(promising) if b not in tried][:BEST_SIZES]
        for b in chosen:
            if b not in attainable:
                attainable[b] = _attainable(tables.search, b)
        tables.solve({b: _inside(attainable[b], tables.brackets(b, floor[b])) for b in chosen})
    return chosen


def _inside(values: np.ndarray, brackets: list[tuple[float, float]]) -> list[float]:
    """A few of the sorted values inside every bracket, evenly taken."""
    out: set[float] = set()
    for low, high in brackets:
        i, j = np.searchsorted(values, [low * (1 + 1e-8), high * (1 - 1e-8)])
        count = min(INSIDE, int(j - i))
        out.update(float(values[i + (j - i) * (k + 1) // (count + 1)]) * (1 + 1e-9) for k in range(count))
    found = sorted(out)
    return found if len(found) <= MOST_INSIDE else [found[i * len(found) // MOST_INSIDE] for i in range(MOST_INSIDE)]


def bottleneck_floor(costs: StageCosts, b: int) -> float:
    """No partition has a faster slowest stage: all devices always busy; the slowest operator alone, its update included."""
    every = costs.graph.all_mask
    spread = costs.least_work_s(every, b) / costs.cluster.num_devices
    most = costs.problem.minibatch_size // b
    trainable = np.array([costs.trainable_bytes(1 << op) for op in range(costs.graph.num_ops)])
    alone = [
        costs.forward_s[costs.row(b // r)] + costs.backward_s[costs.row(b // r)] + costs.finish_array_s(trainable, r) / most
        for r in costs.replicas[b]
    ]
    return max(spread, float(np.min(alone, axis=0).max()))


def _attainable(search: PartitionSearch, b: int) -> np.ndarray:
    """Times of all stages that exist, ascending: the only values that a bottleneck can have."""
    found: list[np.ndarray] = []

    def collect(chain: SeriesChain) -> None:
        for r in search.costs.replicas[b]:
            seconds = search.tables.stage_s(chain, b, r)
            found.append(seconds[np.isfinite(seconds)])
        for block in chain.blocks.values():
            for branch in block.chains:
                collect(branch)

    collect(search.structure.root)
    every = np.sort(np.concatenate(found))
    return every[np.diff(every, prepend=-np.inf) > 0]  # each once


def _laid_out(tables: _SolvedLanes, sizes: list[int], below_s: float) -> Iterator[tuple[float, Parts, int]]:
    """Partitions of the best rows of some sizes, also with light stages merged: (estimate, parts, micro-batch size)."""
    costs = tables.costs
    for spare in (False, True):
        taken = dict.fromkeys(sizes, 0)
        for row in tables.rows(spare):
            b = row.microbatch_size
            if row.estimate_s >= below_s:
                break
            if taken.get(b, LAYOUTS) >= LAYOUTS:
                continue
            taken[b] += 1
            parts = tuple(tables.solved[row.table][1].parts(row.lane, row.h)[0])
            merged = merge_light(costs, parts, b, row.limit_s)
            for each in (merged, parts) if len(merged) < len(parts) else (parts,):
                if sum(r for _, r in each) <= costs.cluster.num_devices:
                    yield row.estimate_s, each, b


def merge_light(costs: StageCosts, partition: Parts, b: int, limit_s: float) -> Parts:
    """Merge neighbours on one device each while both together stay below the limit: a join with a branch's end, a fork with a head.

    The lightest pair goes first. What the merge costs in concurrency is for the judgement of the candidate to say.
    """
    graph, parts = costs.graph, dict(enumerate(partition))
    seconds = [costs.compute_s(mask, b) if r == 1 else np.inf for mask, r in partition]
    owner = {op: p for p, (mask, _) in parts.items() for op in bits(mask)}
    pairs: list[tuple[float, int, int, int]] = []

    def push(p: int, q: int) -> None:
        if seconds[p] < limit_s and seconds[p] + seconds[q] <= limit_s * TOGETHER:
            # The union says later whether both are still what they were.
            heapq.heappush(pairs, (seconds[p] + seconds[q], p, q, parts[p][0] | parts[q][0]))

    def neighbours(p: int, of: tuple[int, ...]) -> set[int]:
        return {owner[other] for op in bits(parts[p][0]) for other in bits(of[op])} - {p}

    for p in parts:
        for q in neighbours(p, graph.successors):
            push(p, q)
    while pairs:
        total, p, q, union = heapq.heappop(pairs)
        if p not in parts or q not in parts or parts[p][0] | parts[q][0] != union or not graph.is_convex(union):
            continue
        low, high = min(p, q), max(p, q)
        owner.update(dict.fromkeys(bits(parts[high][0]), low))
        del parts[high]
        parts[low], seconds[low] = (union, 1), total
        for other in neighbours(low, graph.successors):
            push(low, other)
        for other in neighbours(low, graph.predecessors):
            push(other, low)
    return tuple(parts.values())


def any_that_fits(search: PartitionSearch, assessor: Assessor) -> Candidate | None:
    """Some candidate that fits in memory, however slow; None if the search finds none."""
    sizes = sizes_that_save_memory(search.costs.problem)
    lanes = Lanes(np.array(sizes), np.full(len(sizes), NO_LIMIT))
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
    return [b for b in sizes if b == sizes[0] or problem.regime.keeps_all or problem.minibatch_size // b < deepest]
