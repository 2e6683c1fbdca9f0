"""The times of a program whose devices share fewer processors than they are: workers of one machine with few cores.

Devices that compute at a time get equal shares of the processors, at most one each (egalitarian processor sharing, as
the kernel's fair scheduler has it over a few milliseconds). So what an action takes depends on who else computes, and
times are no longer a longest path: events are worked off in their order. Messages and sums take no processor beside
what a pass is charged for them, and copies to the host take none.

Source: Kleinrock, "Time-shared systems: a theoretical treatment", 1967, for the sharing.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence

from gpp.program.waits import COPY, MEET, OCCUPY, Step, Waits
from gpp.simulate.longest_path import Times

STEPS = 8
"""Steps that a program is repeated for."""

FILLING = 2
"""First steps that do not count for the period; neither does the last one, in which nobody runs ahead any more."""


def shared_times(
    waits: Waits, seconds: Sequence[float], late: Sequence[float], processors: int, *, repeats: int = STEPS
) -> tuple[Times, float]:
    """The times of the last of `repeats` steps, counted from the beginning of the first, and the period.

    Args:
        seconds: for which each action of a label occupies its resource, alone on its processor.
        late: by channel, seconds from the wire to the arrival.
        processors: the number of processors that the devices share.
    """
    run = _SharedRun(waits, seconds, late, processors, repeats)
    run.all()
    first = [min((run.begin[step[1]] for step in own), default=0.0) for own in run.lists]
    counted = repeats - 2 - FILLING
    period = (run.done[-2] - run.done[FILLING]) / counted if counted > 0 else run.done[0]
    return Times(run.begin, run.end, first + [float("inf")] * (waits.num_resources - len(waits.devices)), run.free), period


class _SharedRun:
    """One run over all steps; devices are resources 0, 1, ..."""

    def __init__(self, waits: Waits, seconds: Sequence[float], late: Sequence[float], processors: int, repeats: int) -> None:
        self.waits, self.seconds, self.late, self.processors, self.repeats = waits, seconds, late, processors, repeats
        self.num = len(waits.devices)
        firsts = [waits.first[device] for device in waits.devices]
        self.lists: list[list[Step]] = [[] for _ in range(self.num)]
        for step in waits.order:
            if step[0] == MEET:
                for member in step[4]:
                    self.lists[bisect_right(firsts, member) - 1].append((MEET, member, *step[2:]))
            else:
                self.lists[step[2]].append(step)
        self.now = 0.0
        self.begin, self.end = [0.0] * waits.num_nodes, [0.0] * waits.num_nodes
        self.free = [0.0] * waits.num_resources
        self.done = [0.0] * repeats
        self.at = [(0, 0)] * self.num  # step, place in the list
        self.left: dict[int, float] = {}  # device that computes -> seconds of work left
        self.arrivals: dict[tuple[int, int], float] = {}  # (step, node) of a send -> when it arrives
        self.blocked: dict[tuple[int, int], int] = {}  # (step, node) -> the device that waits for it to be sent
        self.met: dict[tuple[int, tuple[int, ...]], list[int]] = defaultdict(list)
        self.events: list[tuple[float, int]] = []  # when a device goes on

    def all(self) -> None:
        """Handle all events in the order of time."""
        for device in range(self.num):
            self._advance(device)
        while self.left or self.events:
            share = min(1.0, self.processors / len(self.left)) if self.left else 1.0
            device, work = min(self.left.items(), key=lambda item: (item[1], item[0]), default=(-1, float("inf")))
            until = self.now + work / share
            if self.events and self.events[0][0] <= until:
                when, device = heapq.heappop(self.events)
                self._pass(max(when - self.now, 0.0), share)
                self.now = max(when, self.now)
                self._advance(device)
                continue
            self._pass(until - self.now, share)
            self.now = until
            del self.left[device]
            self.end[self.lists[device][self.at[device][1]][1]] = self.now
            self._next(device)
            self._advance(device)

    def _pass(self, seconds: float, share: float) -> None:
        for device in self.left:
            self.left[device] -= seconds * share

    def _next(self, device: int) -> None:
        step, place = self.at[device]
        if place + 1 < len(self.lists[device]):
            self.at[device] = (step, place + 1)
            return
        self.at[device] = (step + 1, 0)
        self.done[step] = max(self.done[step], self.now)
        self.free[device] = self.now

    def _advance(self, device: int) -> None:
        """Let a device go on until it computes, waits, or has come to its end."""
        while self.at[device][0] < self.repeats and self.lists[device]:
            step, place = self.at[device]
            does, node, _, label, needs, occupied = self.lists[device][place]
            if does == OCCUPY:
                for need in needs:
                    when = self.arrivals.get((step, need))
                    if when is None:
                        self.blocked[step, need] = device
                        return
                    if when > self.now:
                        heapq.heappush(self.events, (when, device))
                        return
                self.begin[node] = self.now
                self.left[device] = self.seconds[label]
                return
            if does == MEET:
                self.begin[node] = self.now
                here = self.met[step, needs]
                here.append(device)
                if len(here) == len(needs):
                    over = self.now + self.seconds[label]
                    for member in needs:
                        self.end[member] = over
                    for member in here:
                        self._next_at(member, over)
                return
            start = max(self.free[occupied], self.now)
            if does == COPY:  # what it needs has been issued before it
                start = max([start, *(self.arrivals[step, need] for need in needs)])
            self.begin[node] = start
            self.free[occupied] = start + self.seconds[label]
            self.end[node] = self.arrivals[step, node] = self.free[occupied] + self.late[occupied - self.num]
            reader = self.blocked.pop((step, node), None)
            if reader is not None:
                heapq.heappush(self.events, (self.end[node], reader))
            self._next(device)

    def _next_at(self, device: int, when: float) -> None:
        """A sum is over at `when`: the device goes on then."""
        before, self.now = self.now, when
        self._next(device)
        self.now = before
        heapq.heappush(self.events, (when, device))
