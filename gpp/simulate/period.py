"""The period of a pipeline that repeats one step: seconds by which it is later after every further step.

Training repeats a step, and each device goes on with its next one as soon as its own part of the last is over. So a step costs not
what it takes from its first action to its last, but what the next one adds: a device that ends early fills the pipeline again
while others still drain it.

When the resources (devices and channels) are free after a step is a max-plus linear function of when they were free before it
(Baccelli et al., "Synchronization and Linearity", 1992). So its growth for each step has one limit, which `Period` finds:

* If every resource is first used at f, free at x, and was free at s <= f, then the limit lies between the least x - s of those
  with f = s, which their start held back, and the largest x - f of all. Where both are equal they are the limit. In a chain that
  is so in the very first step: it begins and ends on its first device.
* Else the next step follows from the state that this one left. No resource's growth can exceed the largest growth of the step
  before, so the largest one bounds the limit from above at every step. It is taken for the limit once the end grows by as much,
  twice in a row. An end alone does not do: a device that has more to do falls behind for many steps before the end is its own.
* After `MOST` steps the period is the largest mean growth over the last half of them: at least what any resource has to do.

Two stages before a common one, one micro-batch, two steps. A step alone takes 8 seconds, and the period is 6:

    second   0  1  2  3  4  5  6  7  8  9  10 11 12 13
    d0       F  -  -  .  .  B| F  -  -  .  .  B|              x - f of the first step: 6,  of the second: 12 -  6 = 6
    d1       F  .  .  .  .  B  -  -| F  .  .  B  -  -|                                 8,                 14 -  8 = 6
    d2       .  .  .  F  B|             F  B|                                          2,                 11 -  9 = 2

The first step says 6 to 8: d0 and d1 were both free at 0. Before the second, d1 was free at 8, and did not make d0 wait: 6 to 6.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import inf
from typing import final

MOST = 8
"""The number of steps after which the mean growth is the period."""

SAME = 1e-9
"""Relative difference up to which two periods are equal, because of rounding."""


@final
class Period:
    """Finds the period from successive steps.

    Args:
        agree: gives each of several processes, which have some of the resources each, the largest value of all at each place.

    >>> period = Period()
    >>> first = period.after(start=[0, 0, 0], first=[0, 0, 3], free=[6, 8, 5])
    >>> first, period.after(start=[6, 8, 5], first=[6, 8, 9], free=[12, 14, 11])
    (None, 6)
    """

    def __init__(self, agree: Callable[[list[float]], list[float]] = list) -> None:
        self.agree, self.steps, self.end, self.grew = agree, 0, 0.0, 0.0
        self.middle: list[float] = []
        """When each resource was free in the middle of the steps."""

    def after(self, start: Iterable[float], first: Iterable[float], free: Iterable[float]) -> float | None:
        """The period, or None if it takes another step to know.

        Args:
            start, first, free: for each resource, when it is free before the step, first used (infinity: never), and free after
                it.
        """
        low, high, most, end, mean = inf, 0.0, 0.0, 0.0, 0.0
        free = [*free]
        for s, f, x in zip(start, first, free, strict=True):
            if f < inf:
                end, most, high = max(end, x), max(most, x - s), max(high, x - f)
                if f <= s and x - s < low:
                    low = x - s
        self.steps += 1
        half = MOST // 2
        if self.steps == half:
            self.middle = free
        elif self.steps == MOST:
            mean = max((x - m for m, x in zip(self.middle, free, strict=True)), default=0.0) / half
        held, high, most, end, mean = self.agree([-low, high, most, end, mean])
        if abs(high + held) <= SAME * high:
            return high
        grew, before = end - self.end, self.grew
        self.end, self.grew = end, grew
        if self.steps > 2 and abs(grew - before) <= SAME * grew and most - grew <= SAME * grew:
            return grew
        return mean if self.steps == MOST else None


def repeating(states: Sequence[Sequence[float]], trip: int) -> float | None:
    """Seconds of a step by what grows most, where all times repeat themselves in the end; None where they do not.

    Args:
        states: of each step the same times, in seconds.
        trip: steps that a round trip takes at most. Over some number of steps every time grows alike, after so many steps in a row.

    >>> repeating([[0.0, 1.0], [2.0, 4.0], [6.0, 7.0], [8.0, 10.0], [12.0, 13.0]], trip=1)
    3.0
    """
    last = len(states) - 1
    for over in range(1, last - trip + 1):
        grew = [x - y for x, y in zip(states[last], states[last - over], strict=True)]
        hair = SAME * max(grew, default=0.0)
        if all(
            abs(x - y - each) <= hair
            for j in range(last - trip, last)
            for x, y, each in zip(states[j], states[j - over], grew, strict=True)
        ):
            return max(grew, default=0.0) / over
    return None
