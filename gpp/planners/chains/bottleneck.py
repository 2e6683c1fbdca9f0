"""The chain of stages whose slowest stage is fastest: one dynamic program for PipeDream, for Piper, and for both their forms.

    best[state][k][q] = min over stages that begin there, and ways to run them, of
                        max(time of the stage, best[state behind it][k - devices][q - step])

with k devices and depth q, in whatever unit a planner counts what a stage has in flight. Stages slower than a cap are left
out, and so are those that would waste more device time than a solution at the cap can afford: K devices have cap x K seconds for
each micro-batch, the model's work takes a known part of them, and each stage wastes cap x devices less its own work. That
makes the tables small and changes nothing: a solution at or below the cap is the best of all. If there is none, the cap is raised.

Complexity: O(K x ways x pairs) numpy operations without the cap; with it usually a few per cent of that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from gpp.planners.chains.downsets import Budget, StateFamily

CAPS = (1.02, 1.08, 1.2, 1.5, 2.2, 4.0, 10.0, np.inf)
"""Caps that are tried, in units of the time that all devices would need without any waste."""

NO_CAP = (float("inf"),)

ROUNDING = 1 + 1e-12


class Way(NamedTuple):
    """One way to run stages: so many devices, and what it takes.

    Args:
        key: the planner's own name for it.
        devices: of a stage.
        step: what a stage adds to the depth.
        pairs: [num] the stages, by index of the family's pairs, ascending.
        time_s: [rows, num] at depth 0, 1, ... with the stage itself; one row if depth does not matter. Infinite: does not fit.
    """

    key: object
    devices: int
    step: int
    pairs: np.ndarray
    time_s: np.ndarray


class StageCut(NamedTuple):
    """A stage of the solution: its pair of states, its way, the depth from it to the end."""

    pair: int
    way: Way
    depth: int


class BottleneckChain(NamedTuple):
    """A solution: the slowest stage's time, and the stages from first to last."""

    value_s: float
    cuts: tuple[StageCut, ...]


class Room:
    """Which stages can be part of a solution at a cap.

    Args:
        work: [num_states] least device seconds of each state.
    """

    def __init__(self, family: StateFamily, work: np.ndarray, num_devices: int, cap_s: float) -> None:
        self.family, self.work, self.num_devices, self.cap_s = family, work, num_devices, cap_s
        self.slack_s = num_devices * cap_s - work[-1] if np.isfinite(cap_s) else np.inf
        self._stage_work = work[family.start] - work[family.end]

    def pairs(self, devices: int) -> np.ndarray:
        """Indices of the pairs whose stage can run on so many devices."""
        if not np.isfinite(self.cap_s):
            return np.arange(self.family.num_pairs)
        most = devices * self.cap_s * ROUNDING
        return np.flatnonzero((self._stage_work <= most) & (self._stage_work >= most - self.slack_s * ROUNDING - 1e-12 * most))

    def states(self, devices: int) -> tuple[int, int]:
        """A range of states that holds all those that can be run on exactly so many devices."""
        if not np.isfinite(self.cap_s):
            return 0, self.family.num_states
        fits = (self.work <= devices * self.cap_s * ROUNDING) & (
            self.work[-1] - self.work <= (self.num_devices - devices) * self.cap_s * ROUNDING + 1e-12 * self.work[-1]
        )
        found = np.flatnonzero(fits)
        return (int(found[0]), int(found[-1]) + 1) if len(found) else (0, 0)


def best_chain(
    family: StateFamily,
    work: np.ndarray,
    ways: Callable[[Room], Sequence[Way]],
    num_devices: int,
    budget: Budget,
    *,
    depth: int = 0,
    depth_is_devices: bool = False,
    bounded: bool = False,
    all_devices: bool = False,
    at_most_s: float | None = None,
    caps: tuple[float, ...] = CAPS,
) -> BottleneckChain | None:
    """The best chain of stages on at most `num_devices` devices; None if nothing fits.

    Args:
        work: [num_states] least device seconds of each state: no way to run a stage takes fewer devices x seconds.
        ways: the stages that `Room` leaves, with their times.
        depth: the largest depth that is told apart; it costs nothing as long as every way has one row of times.
        depth_is_devices: the depth of a stage is the number of devices from it to the end.
        bounded: `depth` is a limit that no chain may exceed, whatever the times.
        all_devices: no device may be left idle.
        at_most_s: a value that is known to be reached.
        caps: tried in turn, in units of the least conceivable time; the last one is the last word.
    """
    least = max(float(work[-1]) / num_devices, 1e-30)
    for cap in [least * factor for factor in caps] if at_most_s is None else [at_most_s * ROUNDING]:
        room = Room(family, work, num_devices, cap)
        open_ways = [way for way in ways(room) if len(way.pairs)]
        if depth_is_devices or not (bounded or any(len(way.time_s) > 1 for way in open_ways)):
            open_ways = [way._replace(step=0) for way in open_ways]
        most = depth if any(way.step for way in open_ways) else 0
        found = _BottleneckTable(family, room, open_ways, num_devices, most, budget).solve(all_devices)
        if found is not None and found.value_s <= cap:
            return found
    return None


class _BottleneckTable:
    """The dynamic program at one cap."""

    def __init__(self, family: StateFamily, room: Room, ways: Sequence[Way], num_devices: int, depth: int, budget: Budget) -> None:
        self.family, self.room, self.ways = family, room, ways
        self.num_devices, self.depth, self.budget = num_devices, depth, budget
        shape = (num_devices + 1, depth + 1, family.num_states)
        budget.hold(8.0 * shape[0] * shape[1] * shape[2], "its table")
        self.best = np.full(shape, np.inf)
        self.best[0, 0, 0] = 0.0
        self.starts = [family.start[way.pairs] for way in ways]
        self.ends = [family.end[way.pairs] for way in ways]
        self.firsts = [np.flatnonzero(np.diff(start, prepend=-1)) for start in self.starts]

    def solve(self, all_devices: bool) -> BottleneckChain | None:
        for k in range(1, self.num_devices + 1):
            self.budget.check()
            low, high = self.room.states(k)
            if high > low:
                self._fill(k, low, high)
        final = self.best[:, :, -1]
        if all_devices:
            final = np.where(np.arange(self.num_devices + 1)[:, None] == self.num_devices, final, np.inf)
        value = float(final.min())
        if not np.isfinite(value):
            return None
        k, q = (int(x) for x in np.argwhere(final <= value)[0])
        return BottleneckChain(value, self._trace(k, q))

    def _fill(self, k: int, low: int, high: int) -> None:
        row, deepest = self.best[k], min(self.depth, k)  # a stage adds no more depth than devices
        for w, way in enumerate(self.ways):
            if way.devices > k or way.step > deepest:
                continue
            firsts, starts = self.firsts[w], self.starts[w]
            a, b = np.searchsorted(starts[firsts], (low, high))
            if a == b:
                continue
            begin = firsts[a]
            stop = firsts[b] if b < len(firsts) else len(starts)
            behind = self.best[k - way.devices, : deepest + 1 - way.step][:, self.ends[w][begin:stop]]
            own = way.time_s[self._rows(way, k, way.step, deepest + 1), begin:stop]
            value = np.minimum.reduceat(np.maximum(own, behind), firsts[a:b] - begin, axis=1)
            states = starts[firsts[a:b]]
            row[way.step : deepest + 1, states] = np.minimum(row[way.step : deepest + 1, states], value)

    def _rows(self, way: Way, k: int, low: int, high: int) -> slice:
        """Rows of a way's times for depths `low` to `high`; the row of k devices if that is what depth means."""
        if len(way.time_s) == 1:
            return slice(0, 1)
        return slice(low, high) if way.step else slice(k, k + 1)

    def _trace(self, k: int, q: int) -> tuple[StageCut, ...]:
        """The stages behind a value; ties: most devices, the first such way, the longest stage: few stages fill and drain
        sooner."""
        state, cuts = self.family.num_states - 1, []
        ordered = sorted(enumerate(self.ways), key=lambda pair: (-pair[1].devices, pair[0]))
        while state:
            cut = next(found for w, way in ordered if (found := self._hit(w, way, k, q, state)) is not None)
            cuts.append(StageCut(int(cut.way.pairs[cut.pair]), cut.way, q if cut.way.step else k))
            state = int(self.family.end[cuts[-1].pair])
            k, q = k - cut.way.devices, q - cut.way.step
        return tuple(cuts)

    def _hit(self, w: int, way: Way, k: int, q: int, state: int) -> StageCut | None:
        if way.devices > k or way.step > q:
            return None
        begin, stop = np.searchsorted(self.starts[w], (state, state + 1))
        if begin == stop:
            return None
        own = way.time_s[self._rows(way, k, q, q + 1), begin:stop][0]
        value = np.maximum(own, self.best[k - way.devices, q - way.step, self.ends[w][begin:stop]])
        hits = np.flatnonzero(value <= self.best[k, q, state])
        return StageCut(int(begin + hits[0]), way, q) if len(hits) else None
