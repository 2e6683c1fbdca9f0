"""List scheduling under a cap in bytes: passes are run in modelled time, and a device that is free takes the most urgent one
that is ready.

Gradients of inputs (and whole backwards) come first, since other devices wait for them; then forwards, below the cap; then
gradients of weights, for which nobody waits. Of several stages of a device the one nearest to the sink goes first, and the
others leave room for a micro-batch of it, so that no device is ever full of micro-batches that wait for room on the same
device. Orders are found together with times here; how long an order takes, `gpp.simulate.longest_path` says.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from gpp.program.kinds import KINDS
from gpp.schedules.flow import HAIR, Flow


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """The rule by which a device chooses among several possible passes, or waits.

    Args:
        ahead: by stage, micro-batches between a forward and the first part of the backward; None: as many as fit.
        late: by stage, gradients of weights that may wait before they go before forwards; None: as many as fit.
        patience: share of a pass of weight gradients for which a device rather waits for a pass that others wait for.
    """

    ahead: Sequence[int] | None = None
    late: Sequence[int] | None = None
    patience: float = 0.0


class _Lane:
    """The state of a lane: what it holds, and how far each of its queues is."""

    def __init__(self, flow: Flow, lane: int, rule: Rule, cap: float) -> None:
        self.flow, self.rule = flow, rule
        self.queues, self.stages = flow.queues[lane], flow.stages[lane]
        self.place = dict.fromkeys(self.queues, 0)
        self.full = dict.fromkeys(self.stages, 0)
        self.late = dict.fromkeys(self.stages, 0)
        self.bytes, self.cap = 0.0, cap * (1 + HAIR)
        self.returning = [key for s in self.stages for key in self.queues if key[0] == s and KINDS[key[1]].returns]
        self.holding = [key for s in self.stages for key in self.queues if key[0] == s and KINDS[key[1]].holds]
        self.finishing = [key for s in self.stages for key in self.queues if key[0] == s and _is_late(key[1])]
        self.trained = {s for s, kind in self.queues if KINDS[kind].returns}

    def head(self, key: tuple[int, str]) -> int | None:
        """The next task of a queue."""
        place, queue = self.place[key], self.queues[key]
        return queue[place] if place < len(queue) else None

    def take(self, task: int) -> None:
        """Note that a task begins."""
        s, kind, _ = self.flow.tasks[task]
        row = KINDS[kind]
        self.place[s, kind] += 1
        if s in self.trained:
            self.bytes += self.flow.held[s].change(kind)
            self.full[s] += row.holds - row.returns
            self.late[s] += (row.returns and not row.frees) - _is_late(kind)

    def fits(self, s: int) -> bool:
        """Whether a forward of a stage keeps below the cap, and leaves room for one of each stage nearer to the sink."""
        if s not in self.trained:
            return True
        if self.rule.ahead is not None and self.full[s] >= self.rule.ahead[s]:
            return False
        need = self.bytes + self.flow.held[s].full
        for other in self.stages[: self.stages.index(s)]:
            if other in self.trained and not self.full[other]:
                need += self.flow.held[other].full
        return need <= self.cap

    def choice(self, now: float, arrived: Sequence[float], missing: Sequence[int]) -> int | None:
        """The task to run now; None to wait."""
        soon = float("inf")
        for key in self.returning:
            task = self.head(key)
            if task is not None and not missing[task]:
                if arrived[task] <= now:
                    return task
                soon = min(soon, arrived[task])
        pressed = (
            None if self.rule.late is None else next((k for k in self.finishing if self.late[k[0]] > self.rule.late[k[0]]), None)
        )
        if pressed is not None:
            return self.head(pressed)
        for key in self.holding:
            task = self.head(key)
            if task is not None and not missing[task] and self.fits(key[0]):
                if arrived[task] <= now:
                    return task
                soon = min(soon, arrived[task])
        for key in self.finishing:
            task = self.head(key)
            if task is not None and self.late[key[0]]:
                # What comes before the pass is over would have to wait for it.
                return task if soon - now >= self.rule.patience * self.flow.seconds[task] else None
        return None


def _is_late(kind: str) -> bool:
    row = KINDS[kind]
    return row.frees and not row.returns


def greedy(flow: Flow, rule: Rule) -> list[list[int]] | None:
    """The order of every lane's tasks by a rule, within the flow's room; None if the lanes come to wait for each other."""
    lanes = [_Lane(flow, lane, rule, flow.room[lane]) for lane in range(len(flow.lanes))]
    missing = [len(waits) for waits in flow.needs]
    arrived, out = [0.0] * len(flow.tasks), [list[int]() for _ in lanes]
    free = [0.0] * len(lanes)
    wakes = [(0.0, lane) for lane in range(len(lanes))]
    while wakes:
        now, _ = wakes[0]
        awake = set[int]()
        while wakes and wakes[0][0] <= now:
            awake.add(heapq.heappop(wakes)[1])
        for lane in sorted(awake):
            task = lanes[lane].choice(now, arrived, missing) if free[lane] <= now else None
            if task is None:
                continue
            lanes[lane].take(task)
            out[lane].append(task)
            free[lane] = end = now + flow.seconds[task]
            heapq.heappush(wakes, (end, lane))
            for user, seconds in flow.users[task]:
                missing[user] -= 1
                arrived[user] = max(arrived[user], _rounded(end + seconds, end))
                if not missing[user]:
                    heapq.heappush(wakes, (max(arrived[user], now), flow.lane[user]))
    return out if sum(map(len, out)) == len(flow.tasks) else None


def _rounded(arrival: float, end: float) -> float:
    """The time of an arrival. If only rounding lies between it and the end of a pass, it is that end."""
    return end if arrival - end <= HAIR * end else arrival
