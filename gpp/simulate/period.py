"""The period of a pipeline that repeats one step: seconds by which it is later after every further step.

Training repeats a step, and each device goes on with its next one as soon as its own part of the last is over. So a step costs not
what it takes from its first action to its last, but what the next one adds: a device that ends early fills the pipeline again
while others still drain it.

When the resources (devices and channels) are free after a step is a max-plus linear function of when they were free before it
(Baccelli et al., "Synchronization and Linearity", 1992). So its growth for each step has one limit, which `Period` finds:

* If every resource is first used at f, free at x, and was free at s <= f, then the limit lies between the least x - s of those
  with f = s, which their start held back, and the largest x - f of all. Where both are equal they are the limit. In a chain that
  is so in the very first step: it begins and ends on its first device.
* Else the next step follows from the state that this one left, until the end grows by the same twice in a row, or, after `MOST`
  steps, on average over the last half of them.

Two stages before a common one, one micro-batch, two steps. A step alone takes 8 seconds, and the period is 6:

    second   0  1  2  3  4  5  6  7  8  9  10 11 12 13
    d0       F  -  -  .  .  B| F  -  -  .  .  B|              x - f of the first step: 6,  of the second: 12 -  6 = 6
    d1       F  .  .  .  .  B  -  -| F  .  .  B  -  -|                                 8,                 14 -  8 = 6
    d2       .  .  .  F  B|             F  B|                                          2,                 11 -  9 = 2

The first step says 6 to 8: d0 and d1 were both free at 0. Before the second, d1 was free at 8, and did not make d0 wait: 6 to 6.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, final

MOST = 8
"""The number of steps after which the mean growth is the period."""

SAME = 1e-9
"""Relative difference up to which two periods are equal, because of rounding."""


class Spans(NamedTuple):
    """Bounds on the period, from one step.

    Args:
        low, high: bounds on it.
        end_s: when the last action of the step has ended, from the beginning of the first step.
    """

    low: float
    high: float
    end_s: float


def spans(start: Iterable[float], first: Iterable[float], free: Iterable[float], end_s: float) -> Spans:
    """The spans of a step.

    Args:
        start, first, free: for each resource, when it is free before the step, first used (infinity: never), and free after it.

    >>> spans(start=[0, 0, 0], first=[0, 0, 3], free=[6, 8, 5], end_s=8)
    Spans(low=6, high=8, end_s=8)
    """
    low, high = float("inf"), 0.0
    for s, f, x in zip(start, first, free, strict=True):
        if f < float("inf"):
            if x - f > high:
                high = x - f
            if f <= s and x - s < low:
                low = x - s
    return Spans(low, high, end_s)


@final
class Period:
    """Finds the period from successive steps.

    >>> period = Period()
    >>> period.after(Spans(low=6, high=8, end_s=8)), period.after(Spans(low=6, high=6, end_s=14))
    (None, 6)
    """

    def __init__(self) -> None:
        self.ends: list[float] = []

    def after(self, step: Spans) -> float | None:
        """The period, or None if it takes another step to know."""
        self.ends.append(step.end_s)
        ends, count = self.ends, len(self.ends)
        if abs(step.high - step.low) <= SAME * step.high:
            return step.high
        if count > 2 and abs((ends[-1] - ends[-2]) - (ends[-2] - ends[-3])) <= SAME * (ends[-1] - ends[-2]):
            return ends[-1] - ends[-2]
        half = count // 2
        return (ends[-1] - ends[-1 - half]) / half if count >= MOST else None
