"""Whether the step of a plan surely takes too long, before and while its passes are timed: compiled (`gpp.compiled`).

No period is shorter than the first of the ends of those devices that begin at once (`gpp.simulate.period`). Such a device ends
after all that another one still has to do, and the way back from it, whatever waits there are:

    d0   F F F . . . . B . . B . . B |     what is left for d1, the way back to d0, and what ends d0's step
    d1   . F B F B F B . . . . . . .

So most plans that take too long are known by the first passes of their busiest device, and many before any pass. Where a stage
has a tensor from one behind it in the topological order (`StageEdges.hand_on`), that way is left out: no bound gets larger by it.
"""

from __future__ import annotations

from typing import Final

from gpp.compiled import integers, reals

SAME: Final = 1e-9
"""As `gpp.simulate.period` has it."""

INF: Final = float("inf")


class LateSteps:
    """Looks at the passes of plans of one problem and micro-batch size.

    Args:
        facts: the numbers of the problem (`gpp.planners.search.numbers.ProblemNumbers`).
        room: the shape of a plan (`gpp.planners.search.numbers.PlanArrays`).
    """

    def __init__(self, facts, room) -> None:
        self.num_devices, self.count, self.over, self.sizes = facts.num_devices, facts.count, facts.overheads, room.sizes
        self.unit_stage, self.unit_device, self.pass_s, self.update_s = (
            room.unit_stage,
            room.unit_device,
            room.pass_s,
            room.update_s,
        )
        self.first_in, self.in_pair, self.pair_src, self.pair_back = room.first_in, room.in_pair, room.pair_src, room.pair_back
        self.pair_ahead_s, self.pair_late, self.pair_back_s = room.pair_ahead_s, room.pair_late, room.pair_back_s
        self.sum_set, self.sum_s, self.num_units = room.sum_set, room.sum_s, 0
        # By device: all of its passes and what ends its step; the latter alone; what of both is left; when it can begin at first.
        self.load, self.ends, self.left, self.opens = (reals(facts.num_devices) for _ in range(4))
        # By device that begins at once, and device: what follows the passes of the one until the other has ended.
        self.tail, self.way = reals(facts.num_devices**2), reals(facts.most_units)
        self.at_once, self.num_sources, self.watched, self.no_time, self.below = integers(facts.num_devices), 0, 0, 0, INF

    def prepare(self) -> None:
        """Find what each device of the plan that the room holds has to do, and what follows."""
        self.num_units = self.sizes[0]
        self._add_up()
        self.num_sources = 0
        for f in range(self.num_devices):
            if self.at_once[f]:
                self._find_tails(f)
                self.num_sources += 1

    def watch(self, below_s: float) -> None:
        """Begin to look whether a step takes `below_s` or more."""
        # Behind a pass that takes no time a device begins at once whose end is not looked at.
        self.watched, self.below = 0, INF if self.no_time else below_s
        for d in range(self.num_devices):
            self.left[d] = self.load[d]

    def late(self, d: int, now: float, took: float) -> bool:
        """Whether every device that begins at once is known to end too late, with a device's next pass.

        One of them is looked at until it is late: what makes it late mostly makes the others late, too.
        """
        until = (now + self.left[d]) * (1.0 - 2.0 * SAME)
        while until + self.tail[self.watched * self.num_devices + d] >= self.below:
            self.watched += 1
            if self.watched == self.num_sources:
                return True
        self.left[d] -= took
        return False

    def surely(self) -> bool:
        """`late` before any pass: no device begins before a first micro-batch can have come to it."""
        for d in range(self.num_devices):
            self.opens[d] = INF
        for u in range(self.num_units):
            now = 0.0
            for k in range(self.first_in[u], self.first_in[u + 1]):
                p = self.in_pair[k]
                v = self.pair_src[p]
                if v < u:
                    took = self.pass_s[2 * self.unit_stage[v]] + self.pair_ahead_s[p] + self.pair_late[p]
                    now = max(now, self.way[v] + took)
            self.way[u] = now
            d = self.unit_device[u]
            self.opens[d] = min(self.opens[d], now)
        late = False
        for d in range(self.num_devices):
            if self.opens[d] < INF and self.late(d, self.opens[d], 0.0):
                late = True
                break
        return late

    def _add_up(self) -> None:
        """Find what each device has to do, and which of them begin at once."""
        self.no_time = 0
        for d in range(self.num_devices):
            self.load[d], self.ends[d], self.at_once[d] = 0.0, self.over[5], 0
        for u in range(self.num_units):
            d = self.unit_device[u]
            i = self.unit_stage[u]
            self.load[d] += self.count * (self.pass_s[2 * i] + max(self.pass_s[2 * i + 1], 0.0))
            self.ends[d] += self.update_s[i]
            if self.first_in[u] == self.first_in[u + 1]:
                self.at_once[d] = 1
                if self.pass_s[2 * i] == 0.0:
                    self.no_time = 1
        for s in range(self.sizes[2]):
            for d in range(self.num_devices):
                if self.sum_set[s] >> d & 1:
                    self.ends[d] += self.sum_s[s]
        for d in range(self.num_devices):
            self.load[d] += self.ends[d]

    def _find_tails(self, f: int) -> None:
        """Find what follows the last pass of each device until device f has ended its step, less what ends the device's own."""
        row = self.num_sources * self.num_devices
        for d in range(self.num_devices):
            self.tail[row + d] = INF
        for u in range(self.num_units):
            d = self.unit_device[u]
            way = 0.0 if d == f else -INF
            for k in range(self.first_in[u], self.first_in[u + 1]):
                p = self.in_pair[k]
                v = self.pair_src[p]
                if v < u and self.pair_back[p]:
                    took = self.pair_back_s[p] + self.pair_late[p] + self.pass_s[2 * self.unit_stage[v] + 1]
                    way = max(way, took + self.way[v])
            self.way[u] = way
            self.tail[row + d] = min(self.tail[row + d], way + self.ends[f] - self.ends[d])
