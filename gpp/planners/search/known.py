"""Steps of plans that were timed before, by the numbers that decide them: compiled (`gpp.compiled`).

Most plans that a walk comes by are known under other names: it exchanges two devices that are alike, or comes back to a neighbour.
"""

from __future__ import annotations

from array import array
from typing import Final

from gpp.compiled import integers, reals

INF: Final = float("inf")
ALL: Final = (1 << 64) - 1
FIRST: Final = 0x9E3779B97F4A7C15
SECOND: Final = 0xC2B2AE3D27D4EB4F
"""Odd factors of the two halves of a digest."""

BASE: Final = 1 << 20
"""More than there are replicas and passes."""

ONE: Final = 1
ROWS: Final = 1 << 13
"""Plans that are remembered: a new one takes the row of an old one."""


class KnownSteps:
    """Remembers the steps of plans of one problem and micro-batch size.

    A plan's digest is made of its numbers as `gpp.planners.search.step` reads them, with devices numbered in the order of the
    replicas: which devices they are is in the seconds already.

    Args:
        facts: the numbers of the problem (`gpp.planners.search.numbers.ProblemNumbers`).
        room: the shape of a plan (`gpp.planners.search.numbers.PlanArrays`).
    """

    def __init__(self, facts, room) -> None:
        self.num_devices, self.held, self.sizes, self.order = facts.num_devices, facts.held, room.sizes, room.order
        self.distance, self.first_unit, self.unit_device = room.distance, room.first_unit, room.unit_device
        self.pair_src, self.pair_dst, self.pair_back, self.sum_set = room.pair_src, room.pair_dst, room.pair_back, room.sum_set
        self.pass_s, self.update_s, self.sum_s = _bits(room.pass_s), _bits(room.update_s), _bits(room.sum_s)
        self.pair_late, self.pair_ahead_s, self.pair_back_s = map(_bits, (room.pair_late, room.pair_ahead_s, room.pair_back_s))
        self.label, self.one, self.two, self.row = integers(facts.num_devices), 0, 0, 0
        self.ones, self.twos, self.passes = array("Q", bytes(8 * ROWS)), array("Q", bytes(8 * ROWS)), integers(ROWS)
        self.took, self.reach = reals(ROWS), reals(ROWS)

    def find(self, num_stages: int) -> bool:
        """Whether the plan that the room holds is known, at `row`; else that is the row which it may have."""
        self._digest(num_stages)
        i = self.row = (self.one >> 20) & (ROWS - 1)
        return self.passes[i] > 0 and self.ones[i] == self.one and self.twos[i] == self.two

    def step_s(self, below_s: float) -> float:
        """Seconds of the step at `row`, infinity where it is `below_s` or more; less than nothing where that is not known."""
        i = self.row
        if below_s <= self.reach[i]:
            return INF
        return self.took[i] if self.took[i] < INF else -1.0

    def keep(self, passes: int, took: float, reach: float) -> None:
        """Remember a plan at `row`.

        Args:
            passes: that were timed.
            took: seconds of a step; infinity where a walk ended before they were known.
            reach: seconds that the step is known not to be below.
        """
        i = self.row
        self.ones[i], self.twos[i], self.passes[i] = self.one, self.two, passes
        self.took[i], self.reach[i] = took, reach

    def _digest(self, num_stages: int) -> None:
        """Make the digest of the plan that the room holds."""
        self.one, self.two, labels = FIRST, SECOND, 0
        for d in range(self.num_devices):
            self.label[d] = -1
        for i in range(num_stages):
            at = self.distance[self.order[i]]
            self._mix((at * BASE + self.held[at]) * BASE + self.first_unit[i + 1])
            self._mix(self.pass_s[2 * i])
            self._mix(self.pass_s[2 * i + 1])
            self._mix(self.update_s[i])
        for u in range(self.sizes[0]):
            d = self.unit_device[u]
            if self.label[d] < 0:
                self.label[d] = labels
                labels += 1
            self._mix(self.label[d])
        for p in range(self.sizes[1]):
            self._mix((self.pair_src[p] * BASE + self.pair_dst[p]) * BASE + (1 if self.pair_back[p] else 0))
            self._mix(self.pair_late[p])
            self._mix(self.pair_ahead_s[p])
            self._mix(self.pair_back_s[p])
        for s in range(self.sizes[2]):
            own = 0
            for d in range(self.num_devices):
                if self.sum_set[s] >> d & 1:
                    own |= ONE << self.label[d]
            self._mix(own)
            self._mix(self.sum_s[s])

    def _mix(self, value: int) -> None:
        """Add a number to the digest."""
        self.one = ((self.one ^ value) * FIRST) & ALL
        self.one ^= self.one >> 29
        self.two = ((self.two + value) * SECOND) & ALL
        self.two ^= self.two >> 32


def _bits(numbers):
    """The bits of floating-point numbers as whole ones; the array stays the same."""
    return memoryview(numbers).cast("B").cast("q")
