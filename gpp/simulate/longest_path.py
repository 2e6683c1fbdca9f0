"""The longest path: when actions begin that wait for each other, and for resources that do one thing at a time.

The order on every resource is static, so times need no event queue: in a topological order each action begins when its resource is
free and what it needs has come. Predictions rest on this one walk: a program (`gpp.simulate.simulator`), rounds of equal
micro-batches (`gpp.simulate.recurrence`), the course of a pipeline that trains nothing, and orders of passes that are not a
program yet (`gpp.schedules.flow`). It goes on from any state, so each of them writes down only what repeats itself. The loop is
compiled: `gpp.simulate.walk`.

    slots   0 ... n-1: when a node was over, a message's when it arrived      n ...: when each resource is free

    F0 on d0, 2 seconds         (d0, F0, 2, 0, ())        d0 |F0  |
    its message, 1 and 3 late   (c,  m,  1, 3, (d0,))     c       |m |. . .
    F0 on d1, 2 seconds         (d1, G0, 2, 0, (m,))      d1               |G0  |
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from math import inf
from typing import Any, NamedTuple, final

from gpp.compiled import reals
from gpp.program.waits import MEET, OCCUPY, Waits
from gpp.simulate.period import Period
from gpp.simulate.walk import Walk

MEETING = -1
"""In place of the resource of a meeting, which begins when all its members have come to it and occupies all of them."""

Step = tuple[int, Any, float, float, tuple[int, ...]]
"""The slots of a resource and of a node; seconds for which the node occupies the resource, and from then on until its result is
there; the slots that it waits for. Of a meeting: the nodes and the resources of all members. A bare tuple, which the loop takes
apart."""


def walked(steps: Sequence[Step]) -> Walk:
    """The walk of some steps in their order, which is topological.

    >>> at, begin = array("d", [0.0] * 6), array("d", [0.0] * 3)
    >>> walked([(3, 0, 2.0, 0.0, ()), (5, 1, 1.0, 3.0, (3,)), (4, 2, 2.0, 0.0, (1,))]).go(at, begin)
    >>> begin.tolist(), at.tolist()
    ([0.0, 2.0, 6.0], [2.0, 6.0, 8.0, 2.0, 8.0, 3.0])
    """
    return Walk([(0, 1, steps)])


class Times(NamedTuple):
    """The times of a walk.

    Args:
        begin_s, end_s: by node; a message ends when it arrives. Nodes without a step have none.
        first_s: by resource, when it is first occupied; infinity for one that never is.
        free_s: by resource, when it is free again.
    """

    begin_s: list[float]
    end_s: list[float]
    first_s: list[float]
    free_s: list[float]


def repeated(step: Callable[[Sequence[float]], Times], start: Sequence[float]) -> tuple[Times, float]:
    """The step in which the period shows (`gpp.simulate.period`), and the period.

    Args:
        step: the times of a step, given when each resource is free.
        start: the same for the first one.
    """
    period = Period()
    while True:
        times = step(start)
        found = period.after(start, times.first_s, times.free_s)
        if found is not None:
            return times, found
        start = times.free_s


@final
class LongestPath:
    """Steps that are walked once, or again and again, each time from when the last walk has left the resources free.

    Args:
        steps: in a topological order.
        num_nodes, num_resources: slots of nodes, and behind them of resources.
    """

    def __init__(self, steps: Sequence[Step], num_nodes: int, num_resources: int) -> None:
        self.num_nodes, self.num_resources = num_nodes, num_resources
        self.walk = walked(steps)
        self.opening = self.walk.openings(num_nodes, num_resources)
        """By resource, the first node that occupies it; -1 for one that none does."""

    @classmethod
    def of(cls, waits: Waits, seconds: Sequence[float], late: Sequence[float]) -> LongestPath:
        """That of a program.

        Args:
            seconds: for which each action of a label occupies its resource.
            late: by resource of a channel, less the number of devices: seconds from the wire to the arrival; 0 for a copy, whose
                seconds are all its own.
        """
        n, num, occupy, meet = waits.num_nodes, len(waits.devices), OCCUPY, MEET
        device = [(n + resource,) for resource in range(num)]  # a message or a copy begins when its device has come to it
        steps: list[Step] = [
            (n + resource, node, seconds[label], 0.0, needs)
            if does == occupy
            else (n + occupied, node, seconds[label], late[occupied - num], needs + device[resource])
            if does != meet
            else (MEETING, needs, seconds[label], 0.0, tuple([n + waits.resource(member) for member in needs]))
            for does, node, resource, label, needs, occupied in waits.order
        ]
        return cls(steps, n, waits.num_resources)

    def times(self, start: Sequence[float] | None = None) -> Times:
        """The times of one walk.

        Args:
            start: by resource, when it is free at first; None: at 0.
        """
        n = self.num_nodes
        at, begin = array("d", [0.0] * n + list(start or [0.0] * self.num_resources)), reals(n)
        self.walk.go(at, begin)
        first = [begin[node] if node >= 0 else inf for node in self.opening]
        return Times(begin.tolist(), at[:n].tolist(), first, at[n:].tolist())

    def period(self) -> tuple[Times, float]:
        """The period of walks that follow each other, and the times of that in which it shows, counted from the first one on."""
        return repeated(self.times, [0.0] * self.num_resources)
