"""Lines of operators on devices of several types: the stages, their replicas and their types.

Objective: the slowest stage's time, under a limit on it; then as few stages as possible.

For a limit, a micro-batch size and a line of operators, `reach[used, h]` is the smallest position from which on the line can be
laid out in h stages on `used[k]` devices of each type k. Under a limit the longest stage that fits is the best one with its
type and replicas: what is left is shorter. So the table is exact for a chain, but for replicas on devices of one type only.

Constraints:
1. Stages are intervals between the places to cut: `HeterogeneousChain`.
2. A stage's time on its type, or its transfers, and its share of the update: at most the limit, `_begins`.
3. Memory on its type at its depth in the line: `_begins`.
4. r replicas, r a divisor of b, all of one type: `_steps`.

Complexity: O(U K R L H) for U = product of (devices of a type + 1), refused above `MOST_STATES`, R numbers of replicas, L lanes, H
depths; all states with equally many devices are one array operation.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from gpp.cost.problem import Problem
from gpp.planners.common.candidates import Candidate
from gpp.planners.common.incumbent import Incumbent
from gpp.planners.common.linear_orders import Intervals
from gpp.planners.common.placement import DeviceTypes, Placer
from gpp.planners.common.stage_costs import StageCosts

LAYOUTS = 16
"""Layouts of each line that are judged, with their own types of devices and with the placer's."""

PATIENCE = 6
"""Simulations without a better plan after which no further layout is simulated."""

MOST_STATES = 6000
"""Numbers of devices of each type, multiplied; a larger cluster's types are not laid out."""

MOST_ELEMENTS = 6e7
"""Of the table; with more states, fewer lanes."""

SCAN = (1.001, 1.04, 1.1, 1.2, 1.35, 1.6, 2.0, 2.6, 4.0, 8.0)
"""Limits of the first scan, in units of the least possible bottleneck."""

ROUNDS, INSIDE = 2, 4
"""Times that the bracket around the smallest feasible limit is narrowed, and limits inside it each time."""

FAR, SIZES = 4.0, 4
"""Micro-batch sizes: scanned are those with a floor within that factor of the least, narrowed so many of the best."""

WIDER = (1.03, 1.08, 1.15, 1.3)
"""Limits above the smallest feasible one that are laid out too: shallower ones may finish sooner."""


class ChainLayout(NamedTuple):
    """Parts in the line's order, the types of their devices, and about how long an iteration takes."""

    estimate_s: float
    microbatch_size: int
    parts: tuple[tuple[int, int], ...]
    types: tuple[DeviceTypes, ...]


class _ChainStep(NamedTuple):
    """A stage of r replicas of a type; where it begins, by [lane, depth, end]; and from which states to which, by devices used."""

    device_type: int
    num_replicas: int
    begins: np.ndarray
    moves: dict[int, tuple[np.ndarray, np.ndarray]]


class HeterogeneousChain:
    """One line of operators, and all its layouts.

    Args:
        costs: of average devices; problem: on the cluster as it is.
        table: the line; at: the places where it may be cut, both ends included.
    """

    def __init__(self, costs: StageCosts, problem: Problem, placer: Placer, table: Intervals, at: Sequence[int]) -> None:
        self.costs, self.problem, self.placer = costs, problem, placer
        self.table, self.at = table, np.array(at)
        counts = placer.counts
        self.states = np.array(list(itertools.product(*(range(count + 1) for count in counts))))
        self.weights = np.array([math.prod(count + 1 for count in counts[k + 1 :]) for k in range(len(counts))])
        self.used = self.states.sum(axis=1)
        self.max_depth = min(costs.cluster.num_devices, len(self.at) - 1, 64)
        self._seconds: dict[tuple[int, int, int], np.ndarray] = {}
        self._depths: dict[tuple[int, int, int], np.ndarray] = {}

    def layouts(self) -> list[ChainLayout]:
        """Layouts for the best micro-batch sizes, under the smallest feasible limits and under wider ones, best first."""
        costs = self.costs
        micro = {b: self.problem.minibatch_size // b for b in costs.microbatch_sizes}
        low = {b: self._floor(b) for b in micro}
        least = min(micro[b] * low[b] for b in micro)
        limits = {b: [low[b] * f for f in SCAN] for b in micro if micro[b] * low[b] <= FAR * least}
        high = dict.fromkeys(limits, math.inf)
        for _ in range(ROUNDS + 1):
            for b, limit, fits in self._solve(limits)[0]:
                if fits:
                    high[b] = min(high[b], limit)
            for b in limits:
                low[b] = max([low[b], *(limit for limit in limits[b] if limit < high[b])])
            best = sorted((b for b in limits if math.isfinite(high[b])), key=lambda b: (micro[b] * high[b], b))[:SIZES]
            limits = {b: [low[b] + (high[b] - low[b]) * (i + 1) / (INSIDE + 1) for i in range(INSIDE)] for b in best}
            if not limits:
                return []
        limits = {b: [high[b], *(high[b] * f for f in WIDER)] for b in limits}
        found = {(each.microbatch_size, each.parts, each.types): each for each in sorted(self._solve(limits, trace=True)[1])[::-1]}
        return sorted(found.values())

    def _floor(self, b: int) -> float:
        """A lower bound on the slowest stage of all layouts: all devices always busy, the slowest operator on its best type."""
        whole = [self._compute(k, b // r)[-1] * r for k in range(len(self.placer.types)) for r in self.costs.replicas[b]]
        per_type = np.array(whole).reshape(len(self.placer.types), -1).min(axis=1)
        single = [np.diff(self._compute(k, b // r)) for k in range(len(self.placer.types)) for r in self.costs.replicas[b]]
        rate = float((np.array(self.placer.counts) / np.maximum(per_type, 1e-30)).sum())
        return max(1 / rate, float(np.min(single, axis=0).max()))

    def _compute(self, device_type: int, samples: int) -> np.ndarray:
        """Seconds of the line up to each place on one device."""
        times = self.problem.op_times(samples, self.placer.types[device_type])
        took = (times.forward_s + times.backward_s)[list(self.table.order)]
        return np.concatenate([[0.0], np.cumsum(took)])[self.at]

    def _stages(self, device_type: int, b: int, r: int) -> tuple[np.ndarray, np.ndarray]:
        """Seconds of the stages between places, and the longest pipeline whose micro-batches fit: [first, one past last]."""
        key = device_type, b, r
        if key not in self._seconds:
            costs, table, box = self.costs, self.table, np.ix_(self.at, self.at)
            samples, most = b // r, self.problem.minibatch_size // b
            prefix, moved = self._compute(device_type, samples), table.moved[box]
            seconds = np.maximum(prefix[None, :] - prefix[:, None], moved * (samples / self.placer.mean_rates[device_type]))
            seconds += costs.finish_array_s(table.trainable[box], r) / most
            seconds[np.tri(len(self.at), dtype=bool)] = np.inf
            fits = table.held(box, samples).depth(self.placer.memory_bytes[device_type], most)
            self._seconds[key] = seconds
            self._depths[key] = self.problem.regime.holds.furthest(fits, most, 1 << 20)
        return self._seconds[key], self._depths[key]

    def _steps(self, lanes: list[tuple[int, float]]) -> list[_ChainStep]:
        out = []
        for device_type, count in enumerate(self.placer.counts):
            for r in sorted({r for b, _ in lanes for r in self.costs.replicas[b] if r <= count}):
                can = np.flatnonzero(self.states[:, device_type] >= r)
                moves = {}
                for n in np.unique(self.used[can]).tolist():
                    to = can[self.used[can] == n]
                    moves[n] = to - r * int(self.weights[device_type]), to
                out.append(
                    _ChainStep(device_type, r, np.stack([self._begins(device_type, b, r, limit) for b, limit in lanes]), moves)
                )
        return out

    def _begins(self, device_type: int, b: int, r: int, limit_s: float) -> np.ndarray:
        """[depth, end] -> the first place from which a stage may run up to the end; one past the end where there is none."""
        places = len(self.at)
        if b % r:
            return np.full((self.max_depth + 1, places + 1), places, np.int16)
        seconds, depths = self._stages(device_type, b, r)
        ok = (seconds <= limit_s) & (depths >= np.arange(self.max_depth + 1)[:, None, None])
        found = np.where(ok.any(axis=1), ok.argmax(axis=1), places)
        return np.concatenate([found, np.full((len(found), 1), places)], axis=1).astype(np.int16)

    def _solve(
        self, limits: dict[int, list[float]], *, trace: bool = False
    ) -> tuple[list[tuple[int, float, bool]], list[ChainLayout]]:
        lanes = [(b, limit) for b, many in limits.items() for limit in many]
        out: list[tuple[int, float, bool]] = []
        layouts: list[ChainLayout] = []
        chunk = max(1, int(MOST_ELEMENTS / len(self.states) / (self.max_depth + 1)))
        for start in range(0, len(lanes), chunk):
            some = lanes[start : start + chunk]
            steps = self._steps(some)
            reach = self._reach(some, steps)
            done = reach == 0
            out += [(b, limit, bool(done[:, lane].any())) for lane, (b, limit) in enumerate(some)]
            if trace:
                for lane in range(len(some)):
                    layouts += self._trace(some[lane], lane, reach, steps)
        return out, layouts

    def _reach(self, lanes: list[tuple[int, float]], steps: list[_ChainStep]) -> np.ndarray:
        """[state, lane, stages] -> the first place that can be reached from the end; one too many where nothing can."""
        places = len(self.at)
        reach = np.full((len(self.states), len(lanes), self.max_depth + 1), places, np.int16)
        reach[0, :, 0] = places - 1
        lane, depth = np.arange(len(lanes))[None, :, None], np.arange(1, self.max_depth + 1)[None, None, :]
        for n in range(1, int(self.used.max()) + 1):
            for step in steps:
                if n in step.moves:
                    source, target = step.moves[n]
                    found = step.begins[lane, depth, reach[source][:, :, :-1]]
                    reach[target, :, 1:] = np.minimum(reach[target, :, 1:], found)
        return reach

    def _trace(self, lane_of: tuple[int, float], lane: int, reach: np.ndarray, steps: list[_ChainStep]) -> list[ChainLayout]:
        """The layouts with fewest and with most stages, on as few devices as will do and on as many."""
        b, limit = lane_of
        states, depths = np.nonzero(reach[:, lane] == 0)
        if not len(states):
            return []
        picks = dict.fromkeys(
            min(
                zip(depths.tolist(), (sign * self.used[states]).tolist(), states.tolist(), strict=True),
                key=lambda x: (flip * x[0], *x[1:]),
            )
            for sign in (1, -1)
            for flip in (1, -1)
        )
        out = []
        for h, _, state in picks:
            parts, types, at, left = [], [], 0, h
            while left:
                for step in steps:
                    before = state - step.num_replicas * int(self.weights[step.device_type])
                    if self.states[state, step.device_type] < step.num_replicas:
                        continue
                    end = int(reach[before, lane, left - 1])
                    if step.begins[lane, left, end] == at:
                        break
                else:
                    raise AssertionError("every reachable state has a step that led to it")
                parts.append((self.table.mask(int(self.at[at]), int(self.at[end])), step.num_replicas))
                types.append((step.device_type,) * step.num_replicas)
                state, at, left = before, end, left - 1
            micro = self.problem.minibatch_size // b
            out.append(ChainLayout((micro + h - 1) * limit, b, tuple(parts), tuple(types)))
        return out


def simulate_layouts(incumbent: Incumbent, costs: StageCosts, table: Intervals, at: Sequence[int]) -> None:
    """Simulate the best layouts of a chain, if its tables stay small.

    Args:
        costs, table, at: as in `HeterogeneousChain`.
    """
    assessor = incumbent.assessor
    if math.prod(count + 1 for count in assessor.placer.counts) > MOST_STATES:
        return
    layouts = HeterogeneousChain(costs, assessor.problem, assessor.placer, table, at).layouts()[:LAYOUTS]
    tried = (
        assessor.assess(layout.parts, layout.microbatch_size, types=types, chain=True)
        for layout in layouts
        for types in (layout.types, None)
    )
    incumbent.simulate_all([candidate for candidate in tried if isinstance(candidate, Candidate)], PATIENCE)
