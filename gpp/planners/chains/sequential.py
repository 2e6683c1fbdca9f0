"""The best chain of stages: what systems without branches can do.

Stands for the planners of PipeDream (2BW) and Piper without their search over down-sets: the operators
are put into one order, depth first so that branches stay in one piece, the order is cut into a chain
of stages, and stages may be replicated.

Objective: the estimated time of an iteration, bubble included,

    g(stage i..j, rest) = max(M * t + u, t + c + g(rest)),    M = mini-batch / micro-batch

with t the stage's forward plus backward of one micro-batch (or its boundary's transfers, if longer), c the
transfers behind it and u its gradient all-reduce and update; unrolled, the longest way in and out plus
all micro-batches and the update of the slowest stage. For every micro-batch size and
number of stages the best chain is kept (`chain_candidates`); `predict` decides between them, the whole model
as one stage and the even chains, and from the best one a hill is climbed over predictions (`climb_chains`).

Constraints:
1. Stages are intervals of one topological order: `depth_first_order`.
2. Memory: the stage at position s from the end keeps min(s * b, mini-batch) samples: `_rows`.
3. A stage has r replicas, r a divisor of b: `StageCosts.replicas`.
4. All stages use the same b; b is swept: `chain_candidates`.

Complexity: O(S D P) numpy operations per b, with S stages, D devices and P the (interval, r) pairs that
are fast enough to beat the best known chain; exact for the objective on a homogeneous cluster. Where that is
more than `MOST_CELLS`, one table does for all numbers of stages, in O(D P), cut at `MOST_PLACES` places.

Departures: PipeDream minimises only the slowest stage, which leaves bubbles out. On unequal devices or
links the tables are those of the slowest and smallest device, and each plan is judged on its own ones;
chains are laid out type by type (`heterogeneous_chain`), too, and the best ones improved on their own
devices (`rebalance`).
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from typing import NamedTuple, final

import numpy as np

from gpp.cost.problem import Problem
from gpp.plan.plan import Plan
from gpp.planners.base import AbstractPlanner, Predict
from gpp.planners.chains.even import even_candidates
from gpp.planners.common.average import average
from gpp.planners.common.candidates import Assessor, Candidate
from gpp.planners.common.incumbent import MARGIN, Incumbent
from gpp.planners.common.infeasible import explain
from gpp.planners.common.linear_orders import Intervals, depth_first_order, intervals
from gpp.planners.common.local_search import climb_best, in_vain
from gpp.planners.common.moves import CHAINS
from gpp.planners.common.rebalance import rebalance
from gpp.planners.common.stage_costs import StageCosts
from gpp.planners.search.line import best_chain
from gpp.settings import Count, settings


@final
@settings("strategy.planner")
class Sequential(AbstractPlanner):
    """Best contiguous chain over a topological order.

    Args:
        replication: whether a stage may be replicated.
        patience: simulations without a better plan after which the search ends.
    """

    replication: bool = True
    patience: Count = 6

    def plan(self, problem: Problem, predict: Predict) -> Plan:
        """The best chain that the search finds.

        >>> [stage.devices for stage in Sequential().plan(problem, predict).stages]
        [(0,), (1,)]
        """
        assessor = Assessor(StageCosts(problem, replication=self.replication))
        climbed = best_chains(assessor, predict, "sequential", in_vain(problem, self.patience))
        incumbent = min((own for own, _ in climbed), key=lambda one: one.best_s)
        if incumbent.best is None:
            raise explain(problem, self._attempt)
        best = incumbent.best
        text = (
            f"best of {incumbent.num_simulated} simulated chains: {len(best.stages)} stage{'s' * (len(best.stages) != 1)}, "
            f"micro-batch {best.stages[0].microbatch_size}"
        )
        return replace(best, explanation=(text,))

    def _attempt(self, problem: Problem) -> Candidate | None:
        costs = StageCosts(problem, replication=self.replication)
        return next(iter(chain_candidates(Assessor(costs), any_one=True)), None)


def best_chains(assessor: Assessor, predict: Predict, planner: str, patience: int) -> list[tuple[Incumbent, list[Candidate]]]:
    """All that is searched for chains: each search with what it has found, and the dynamic program's candidates.

    With replicas, if they are allowed, and without: each climb ends on a hill of its own, and the better of two is never worse
    for the freedom to replicate.

    Args:
        planner: whose plans they will be.
    """
    searches = []
    for judge in (assessor, _without_replicas(assessor)) if assessor.costs.replication else (assessor,):
        own = Incumbent(judge, planner, predict)
        searches.append((own, climb_chains(own, patience)))
    return searches


def _without_replicas(assessor: Assessor) -> Assessor:
    """The same judge, with all that it knows, for a search whose stages have one device each."""
    other = copy(assessor)
    other.costs = StageCosts(assessor.problem, replication=False)
    other.posed = other.posed._replace(replicas=other.costs.replicas)
    return other


def climb_chains(incumbent: Incumbent, patience: int) -> list[Candidate]:
    """Leave the best chain in `incumbent`; returns the dynamic program's candidates.

    The estimate is a bound that many chains share when a mini-batch has few micro-batches, so from the best of the dynamic
    program's chains, the whole model as one stage, and the even ones a hill is climbed over predictions.
    """
    candidates = chain_candidates(incumbent.assessor)
    incumbent.simulate_all(candidates, patience)
    incumbent.simulate_all(_one_stage(incumbent.assessor))
    incumbent.simulate_all(even_candidates(incumbent.assessor))
    order = depth_first_order(incumbent.assessor.graph)
    climb_best(incumbent, patience, moves=CHAINS, order=order)
    if not incumbent.assessor.cluster.homogeneous:
        _on_types(incumbent, order)
        rebalance(incumbent, order)
    return candidates


def _one_stage(assessor: Assessor) -> list[Candidate]:
    """The model in one piece, on one device and replicated, with every micro-batch size that fits."""
    costs = assessor.costs
    found = (assessor.assess([(costs.graph.all_mask, r)], b, chain=True) for b in costs.microbatch_sizes for r in costs.replicas[b])
    return [candidate for candidate in found if isinstance(candidate, Candidate)]


def _on_types(incumbent: Incumbent, order: tuple[int, ...]) -> None:
    """Simulate chains whose stages are as long as the devices are fast that they are laid out on."""
    from gpp.planners.common.heterogeneous_chain import simulate_layouts

    costs = StageCosts(average(incumbent.assessor.problem)[0], replication=incumbent.assessor.costs.replication)
    table = intervals(costs, order)
    simulate_layouts(incumbent, costs, table, _places(table))


def _places(table: Intervals) -> Sequence[int]:
    """Where a line may be cut, both ends included: in a very long one at places that are equally far apart in time."""
    last, into = len(table.order), table.prefix_s[0]
    if last <= MOST_PLACES:
        return range(last + 1)
    return sorted({0, last, *map(int, np.searchsorted(into, into[-1] * np.arange(1, MOST_PLACES) / MOST_PLACES))})


def chain_candidates(assessor: Assessor, *, any_one: bool = False) -> list[Candidate]:
    """For every micro-batch size and number of stages the chain with the best estimate, if it fits.

    Args:
        any_one: stop at the first micro-batch size for which a chain fits.
    """
    costs = assessor.costs
    table = intervals(costs, depth_first_order(costs.graph))
    out, best = [], np.inf
    searches = [_ChainSearch(costs, table, b) for b in costs.microbatch_sizes]
    for search in sorted(searches, key=lambda search: (search.least_s, search.b)):
        b = search.b
        # Chains far above the best estimate so far are not worth their incumbent.
        for estimate, parts in search.solve(best * WORTH):
            candidate = assessor.assess(parts, b, chain=True)
            if isinstance(candidate, Candidate):
                best = min(best, estimate)
                out.append(candidate)
        if out and any_one:
            break
    return out


MOST_PLACES = 256
"""Places where a line may be cut."""

WORTH = 1.3
"""Chains are kept up to this factor above the best estimate: what transfers may change in a prediction."""


MOST_CELLS = 3e7
"""Entries of the tables by number of stages, for one micro-batch size; where there were more, one table does for all of them."""

FAR = 2.0
"""Stages of that table take at most so many times the least that any chain could."""


class _StageRows(NamedTuple):
    """The intervals [i, j) that may be a stage with r replicas, by ascending i, then r, then j.

    Args:
        busy_s: M micro-batches and the update; through_s: one micro-batch and the transfers behind it.
        depth: longest pipeline from the stage on that fits.
    """

    i: np.ndarray
    j: np.ndarray
    replicas: np.ndarray
    busy_s: np.ndarray
    through_s: np.ndarray
    depth: np.ndarray

    def of(self, i: int) -> _StageRows:
        """Those that begin at a place."""
        low, high = np.searchsorted(self.i, (i, i + 1))
        return _StageRows(*(values[low:high] for values in self))


class _ChainSearch:
    """The dynamic program for one micro-batch size."""

    def __init__(self, costs: StageCosts, intervals: Intervals, microbatch_size: int) -> None:
        self.costs, self.intervals, self.b = costs, intervals, microbatch_size
        self.num_ops, self.num_devices = costs.graph.num_ops, costs.cluster.num_devices
        self.num_microbatches = costs.problem.minibatch_size // microbatch_size
        # No chain is faster than all devices busy all the time, nor than one micro-batch on its way through all of it.
        self.ideal_s = min(
            self.num_microbatches * costs.compute_s(costs.graph.all_mask, self.b // r) * r / self.num_devices
            for r in costs.replicas[self.b]
        )
        shares = [costs.row(self.b // r) for r in costs.replicas[self.b]]
        way_s = float((costs.forward_s[shares] + costs.backward_s[shares]).min(axis=0).sum())
        self.least_s = max(self.ideal_s, way_s)

    def solve(self, worth_s: float) -> list[tuple[float, list[tuple[int, int]]]]:
        """(estimate, parts) of the best chain of each number of stages, up to `worth_s`.

        Stages slower than a cap are left out, which makes the tables small; if the best chain is
        not below the cap, it is raised.
        """
        if self.least_s * MARGIN > worth_s:
            return []
        most = min(self.num_devices, self.num_ops) * self.num_devices
        if most * self.num_ops > MOST_CELLS:
            return self._solve_large(worth_s)
        cap = min(1.5 * self.ideal_s, worth_s)
        while True:
            rows, complete = self._rows(cap, range(self.num_ops + 1))
            if most * len(rows.i) > MOST_CELLS:
                return self._solve_large(worth_s)
            tables = self._tables(rows)
            ends = [float(table[-1, 0]) for table in tables]
            best = min(ends[1:], default=np.inf)
            if best <= cap or complete or cap >= worth_s:
                break
            cap = min(2 * cap, worth_s)
        kept = min(WORTH * best, worth_s, np.inf if complete else cap)
        return [(end, self._trace(rows, tables, s)) for s, end in enumerate(ends) if s and end <= kept and np.isfinite(end)]

    def _rows(self, cap_s: float, places: Sequence[int]) -> tuple[_StageRows, bool]:
        """Every interval between some places, with its numbers of replicas, that fits at least as the last stage (constraint 2) and
        takes at most `cap_s`; and whether these are all that fit.
        """
        costs, table, n = self.costs, self.intervals, self.num_ops
        starts, ends = np.triu_indices(len(places), 1)
        every_i, every_j = np.asarray(places)[starts], np.asarray(places)[ends]
        m, link = self.num_microbatches, costs.link
        out, complete = [], True
        for r in costs.replicas[self.b]:
            samples = self.b // r
            prefix = table.prefix_s[costs.row(samples)]
            quick = m * (prefix[every_j] - prefix[every_i]) <= cap_s
            i, j = every_i[quick], every_j[quick]
            stage_s = np.maximum(prefix[j] - prefix[i], table.moved[i, j] * samples / link.bandwidth_bytes_per_s)
            busy_s = m * stage_s + costs.finish_array_s(table.trainable[i, j], r)
            move = np.where(j < n, 2 * link.latency_s + table.link_out_bytes[j] * samples / link.bandwidth_bytes_per_s, 0.0)
            depth = table.held((i, j), samples).depth(costs.limit_bytes, m)
            depth = costs.problem.regime.holds.furthest(depth, m, n).astype(int)
            quick = busy_s <= cap_s
            complete = complete and int(quick.sum()) == len(every_i)
            fits = quick & (depth >= 1)
            own = _StageRows(i, j, np.full(len(i), r), busy_s, stage_s + move, depth)
            out.append([values[fits] for values in own])
        rows = _StageRows(*(np.concatenate(values) for values in zip(*out, strict=True)))
        order = np.lexsort((rows.j, rows.replicas, rows.i))
        return _StageRows(*(values[order] for values in rows)), complete

    def _solve_large(self, worth_s: float) -> list[tuple[float, list[tuple[int, int]]]]:
        """As `solve`, the best chain of any number of stages alone, between at most `MOST_PLACES` places equally far apart in time.

        Each stage stands before the best rest for as many devices.
        """
        if self.least_s >= worth_s / WORTH:
            return []
        places = _places(self.intervals)
        rows, _ = self._rows(min(FAR * self.least_s, worth_s), places)
        i, j = np.searchsorted(places, rows.i), np.searchsorted(places, rows.j)
        of = (rows.replicas, rows.busy_s, rows.through_s, rows.depth)
        estimate, stages = best_chain(i, j, *of, len(places) - 1, self.num_devices)
        if estimate > worth_s or not stages:
            return []
        at = [(int(rows.i[row]), int(rows.j[row]), int(rows.replicas[row])) for row in stages]
        return [(estimate, [(self.intervals.mask(first, end), r) for first, end, r in at])]

    def _tables(self, rows: _StageRows) -> list[np.ndarray]:
        """g[s][d, i]: the best estimate of operators i.. in exactly s stages on at most d devices."""
        # A table has rows of infinities before that of no devices: what stages find that have more replicas than there are devices.
        beyond, width = max(self.costs.replicas[self.b]), self.num_ops + 1
        shape = (beyond + self.num_devices + 1, width)
        before = np.full(shape, np.inf)
        before[beyond:, self.num_ops] = 0.0
        tables = [before[beyond:]]
        behind = (beyond - rows.replicas) * width + rows.j + width * np.arange(self.num_devices + 1)[:, None]
        starts = np.flatnonzero(np.diff(rows.i, prepend=-1))
        for s in range(1, min(self.num_devices, self.num_ops) + 1):
            value = before.take(behind)
            value += np.where(rows.depth >= s, rows.through_s, np.inf)
            np.maximum(value, rows.busy_s, out=value)
            before = np.full(shape, np.inf)
            before[beyond:, rows.i[starts]] = np.minimum.reduceat(value, starts, axis=1)
            if not np.isfinite(before).any():
                break
            tables.append(before[beyond:])
        return tables

    def _trace(self, rows: _StageRows, tables: list[np.ndarray], stages: int) -> list[tuple[int, int]]:
        """The chain behind g[stages][D, 0]; ties: fewest replicas, then the shortest first stage."""
        parts, d, i = [], self.num_devices, 0
        for s in range(stages, 0, -1):
            own = rows.of(i)
            left = d - own.replicas
            value = np.maximum(own.busy_s, own.through_s + tables[s - 1][np.maximum(left, 0), own.j])
            hits = (value <= tables[s][d, i]) & (left >= 0) & (own.depth >= s)
            at = int(hits.argmax())
            parts.append((self.intervals.mask(i, int(own.j[at])), int(own.replicas[at])))
            d, i = int(left[at]), int(own.j[at])
        return parts
