"""The best order of a flow by constraint programming, with a proven bound (OR-Tools' CP-SAT, optional), and a bound without it.

Variables are the starts of all passes. Constraints:
1. A pass begins when its messages have arrived: `_OrderModel.starts`.
2. The passes of a lane do not overlap; those of one kind of a stage are first-in first-out: `_OrderModel.starts`.
3. Micro-batches hold no more bytes than the lane has room for: `_OrderModel.memory`. Where a micro-batch of a lane's only stage
   holds as much late as in full, and c of them have room, F(m + c) comes after W(m), and nothing else is needed.

Objective: the step's end, or its period. A period of P seconds is possible if and only if there are starts of one step with
which no lane needs longer than P from its first pass to its update: repeat them every P seconds; and where a training repeats a
step every P seconds, each lane begins its next step after its update.

Two cuts for each lane tell the solver what it would take long to find out (`_OrderModel.cuts`): from the end of its first
forward to its first pass backwards it can run only forwards, as many as have room; and from the end of its last forward to its
last pass backwards only passes backwards of what it holds.

Times are rounded down to the solver's integers, so what is proven of its objective holds for the flow.

Limited by deterministic time, one worker, fixed seed: the same flow gives the same order. Source of the solver: Perron and Didier,
"CP-SAT", Google OR-Tools.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable, Sequence
from functools import cache, lru_cache
from typing import Any, Literal, NamedTuple, final

from gpp.errors import InvalidConfig
from gpp.program.kinds import KINDS
from gpp.schedules.flow import HAIR, Flow, Wait, arrivals
from gpp.simulate.longest_path import LongestPath, Step, Times

UNITS = 200_000
"""The best known time in the solver's integer units, unless all times are multiples of a larger unit."""

MOST_TASKS = 1000
"""Passes of a step up to which a search is worth its time."""

Aim = Literal["period", "end"]


class Proven(NamedTuple):
    """The order that a search has found, and the bound that it has proven.

    Args:
        by_lane: the best order.
        bound_s: no order's period, or end, is less.
        closed: whether the search came to its end.
    """

    by_lane: list[list[int]]
    bound_s: float
    closed: bool


def value_of(flow: Flow, by_lane: Sequence[Sequence[int]], aim: Aim) -> float:
    """The period of an order, or the end of its step, in seconds; infinity where lanes wait for each other."""
    path = flow.path(by_lane)
    if path is None:
        return math.inf
    return path.period()[1] if aim == "period" else max(path.times().free_s)


def bound_s(flow: Flow, aim: Aim) -> float:
    """A lower bound on the period, or on the end of a step, of every order that keeps to the flow's room, without a search."""
    heads, tails, cuts = _heads(flow), _tails(flow), _LaneCuts(flow)
    out = 0.0
    for lane, work in enumerate(flow.work_s):
        if own := [i for queue in flow.queues[lane].values() for i in queue]:
            around = min(heads[i] for i in own) if aim == "end" else 0.0
            out = max(out, around + work + cuts.idle_s(lane))
    if aim == "end":
        known = ((lane, ends) for lane, ends in enumerate(cuts.ends) if ends is not None)
        busy = (heads[ends.first] + cuts.between_s(lane) + tails[ends.ends] for lane, ends in known)
        return max([out, *busy, *(head + tail for head, tail in zip(heads, tails, strict=True))])
    return max(out, cuts.round_trip_s())


def prove(flow: Flow, hint: Sequence[Sequence[int]], aim: Aim, limit: float) -> Proven:
    """Search for a better order than `hint`.

    Args:
        limit: deterministic seconds.

    Raises:
        InvalidConfig: OR-Tools is not installed.
    """
    best_s, least_s = value_of(flow, hint, aim), bound_s(flow, aim)
    by_lane = [list(own) for own in hint]
    if best_s <= least_s * (1 + HAIR):
        return Proven(by_lane, best_s, True)
    try:
        from ortools.sat.python import cp_model
    except ImportError:
        rule, fix = "needs OR-Tools, which is not installed", "pip install -e '.[exact]'"
        raise InvalidConfig("strategy.schedule", "optimal", rule, fix) from None
    model = _OrderModel(cp_model, flow, aim, hint, best_s, least_s)
    found, proven_s, closed = model.solve(limit)
    if found is not None and value_of(flow, found, aim) < best_s * (1 - HAIR):
        by_lane, best_s = found, value_of(flow, found, aim)
    return Proven(by_lane, min(best_s, max(least_s, proven_s)), closed)


@lru_cache(maxsize=8)
def proven(flow: Flow, hint: tuple[tuple[int, ...], ...], aim: Aim, limit: float) -> Proven:
    """The result of `prove`, kept for each flow, because a run asks for the same order several times."""
    return prove(flow, hint, aim, limit)


def _heads(flow: Flow) -> list[float]:
    """The earliest start of each task, if lanes could run any number of passes at once, but those of one kind of a stage in
    turn."""
    return _eased(flow, range(len(flow.tasks)), flow.needs).begin_s


def _tails(flow: Flow) -> list[float]:
    """The least time from the start of each task to the end of the last one that waits for it."""
    return _eased(flow, range(len(flow.tasks) - 1, -1, -1), flow.users).end_s


def _eased(flow: Flow, order: Iterable[int], waits: Sequence[Sequence[Wait]]) -> Times:
    """The times of the tasks, each behind those that it waits for, where each queue of a lane runs beside the others."""
    before, slots = arrivals(waits)
    queues = {key: slots + i for i, key in enumerate((lane, *queue) for lane, own in enumerate(flow.queues) for queue in own)}
    steps: list[Step] = []
    for i in order:
        messages, needs = before[i]
        steps += [*messages, (queues[flow.lane[i], *flow.tasks[i][:2]], i, flow.seconds[i], 0.0, needs)]
    begin, end, *_ = LongestPath(steps, slots, len(queues)).times()
    return Times(begin[: len(flow.tasks)], end[: len(flow.tasks)], [], [])


class _LaneEnds(NamedTuple):
    """The passes of a lane of one stage between which its cuts lie, and the most that it can run between them.

    Args:
        first, begins: the first forward, and the first pass backwards.
        ahead_s: seconds of the forwards that have room between them.
        last, ends: the last forward, and the last pass backwards.
        behind_s: seconds of the passes backwards that are left between them.
        last_s: seconds of the last micro-batch's passes from that start on, and of updates.
        apart: whether the first pass backwards comes before the last forward, since not all forwards have room.
    """

    first: int
    begins: int
    ahead_s: float
    last: int
    ends: int
    behind_s: float
    last_s: float
    apart: bool


@final
class _LaneCuts:
    """Idle time that no order can avoid, of lanes that run one stage."""

    def __init__(self, flow: Flow) -> None:
        self.flow = flow
        self.ways_s = cache(self._ways_s)
        self.ends = [self._ends_of(lane) for lane in range(len(flow.lanes))]

    def _ends_of(self, lane: int) -> _LaneEnds | None:
        """The ends of a lane's passes; None for a lane of several stages, and for one without backwards."""
        flow = self.flow
        queues = {kind: queue for (_, kind), queue in flow.queues[lane].items()}
        back = next((kind for kind in queues if KINDS[kind].returns), None)
        if len(flow.stages[lane]) != 1 or back is None:
            return None
        forwards = next(queue for kind, queue in queues.items() if KINDS[kind].holds)
        late = next((queue for kind, queue in queues.items() if KINDS[kind].frees and not KINDS[kind].returns), ())
        held, room, count = flow.held[flow.stages[lane][0]], flow.room[lane] * (1 + HAIR), len(forwards)
        most = count if held.full * count <= room else int(room / held.full)
        # Behind the last forward, with it in hand: so many others in full, the rest of the room for late ones.
        slow = max(flow.seconds[i] for i in queues[back])
        slow_late = max((flow.seconds[i] for i in late), default=0.0)
        behind = 0.0
        for full in range(most):
            left = room - held.full * (full + 1)
            waiting = (min(count - 1 - full, int(left / held.late)) if held.late > 0 else count - 1 - full) if late else 0
            behind = max(behind, full * (slow + slow_late) + waiting * slow_late)
        return _LaneEnds(
            last_s=flow.seconds[queues[back][-1]] + sum(flow.seconds[i] for i in late[-1:]) + flow.update_s[lane],
            first=forwards[0],
            begins=queues[back][0],
            ahead_s=(most - 1) * max(flow.seconds[i] for i in forwards),
            last=forwards[-1],
            ends=queues[back][-1],
            behind_s=behind,
            apart=most < count,
        )

    def _before_s(self, ends: _LaneEnds) -> float:
        """Seconds that a lane idles between its first forward and its first pass backwards, whatever the order."""
        return max(self.ways_s(ends.first)[ends.begins] - self.flow.seconds[ends.first] - ends.ahead_s, 0.0)

    def idle_s(self, lane: int) -> float:
        """Seconds that a lane idles between its first forward and its last pass backwards, whatever the order."""
        ends = self.ends[lane]
        if ends is None:
            return 0.0
        start = self._before_s(ends)
        stop = max(self.ways_s(ends.last)[ends.ends] - self.flow.seconds[ends.last] - ends.behind_s, 0.0)
        return start + stop if ends.apart else max(start, stop)

    def between_s(self, lane: int) -> float:
        """The least time from the start of a lane's first forward to that of its last pass backwards, whatever the order.

        When the last forward begins, some of the others are in full, some late, as have room beside it. What is done by then has
        taken its time; from then on it takes the way there and back, or what is left to be done in the meantime.
        """
        flow, ends = self.flow, self.ends[lane]
        assert ends is not None  # asked of lanes with one stage alone
        forwards, back, *second = ([flow.seconds[i] for i in queue] for queue in _chain(flow.queues[lane], flow.stages[lane][0]))
        late, others = second[0] if second else [], len(forwards) - 1
        held, room = flow.held[flow.stages[lane][0]], flow.room[lane] * (1 + HAIR)

        def waiting(full: int) -> int:
            """The most micro-batches that are held late beside so many in full."""
            left = others - full
            return min(left, int((room - held.full * (full + 1)) / held.late)) if late and held.late > 0 else left

        # Of those late when the last pass backwards begins, no more than have room beside its own micro-batch.
        forced = sum(late[: others - waiting(0)]) if late else 0.0
        way, start = self.ways_s(ends.last)[ends.ends], self._before_s(ends) if ends.apart else 0.0
        least = math.inf
        for full in range(others + 1):
            if held.full * (full + 1) > room:
                break
            done = sum(forwards[:-1]) + sum(back[: others - full]) + sum(late[: others - full - waiting(full)])
            least = min(least, start + done + max(way, forwards[-1] + sum(back[others - full : others])))
        return max(least, sum(forwards) + sum(back[:-1]) + forced + self.idle_s(lane))

    def round_trip_s(self) -> float:
        """The longest way of a lane's first micro-batch to another lane, through all that this one does between its first one
        and its last one, and of the last one back."""
        out, known = 0.0, [(ends, self.between_s(lane)) for lane, ends in enumerate(self.ends) if ends is not None]
        for ends, _ in known:
            there = self.ways_s(ends.first)
            for other, between_s in known:
                if other.first in there and ends.ends in (back := self.ways_s(other.ends)):
                    out = max(out, there[other.first] + between_s + back[ends.ends] + ends.last_s)
        return out

    def _ways_s(self, a: int) -> dict[int, float]:
        """The least time from the start of a task to that of every task that waits for it: the number of that one -> seconds."""
        flow, far, todo = self.flow, {a: 0.0}, [a]
        # Tasks are numbered in a topological order.
        while todo:
            i = heapq.heappop(todo)
            for user, seconds in flow.users[i]:
                if user not in far:
                    heapq.heappush(todo, user)
                far[user] = max(far.get(user, 0.0), far[i] + flow.seconds[i] + seconds)
        return far


class _OrderModel:
    """The model for the solver. Its times are whole units, rounded down."""

    def __init__(self, cp_model: Any, flow: Flow, aim: Aim, hint: Sequence[Sequence[int]], best_s: float, least_s: float) -> None:
        self.cp, self.flow, self.aim = cp_model, flow, aim
        self.unit = _unit(flow, best_s)
        self.took = [self.floor(seconds) for seconds in flow.seconds]
        self.model = cp_model.CpModel()
        path = flow.path(hint)
        assert path is not None  # a hint can run
        times = path.times()
        self.most = math.ceil(best_s / self.unit)
        # A step of the best period may end later than the hint's, by less than a period.
        self.horizon = self.most if aim == "end" else math.ceil((max(times.free_s) + best_s) / self.unit)
        self.value = self.model.new_int_var(min(self.floor(least_s), self.most), self.most, "value")
        self.starts()
        self.memory()
        self.cuts()
        self.aims()
        self.model.minimize(self.value)
        for var, start in zip(self.start, times.begin_s, strict=False):
            self.model.add_hint(var, self.floor(start))

    def floor(self, seconds: float) -> int:
        return math.floor(seconds / self.unit * (1 + HAIR))

    def starts(self) -> None:
        """Add constraints 1 and 2."""
        flow, m = self.flow, self.model
        heads, tails = _heads(flow), _tails(flow)
        ends = [self.horizon - self.floor(tail * (1 - HAIR)) for tail in tails]
        low = [self.floor(head * (1 - HAIR)) for head in heads]
        self.start = [m.new_int_var(low[i], max(ends[i], low[i]), f"t{i}") for i in range(len(flow.tasks))]
        for i, waits in enumerate(flow.needs):
            for need, seconds in waits:
                m.add(self.start[i] >= self.start[need] + self.took[need] + self.floor(seconds))
        for queues in flow.queues:
            own = [i for queue in queues.values() for i in queue]
            m.add_no_overlap([m.new_fixed_size_interval_var(self.start[i], self.took[i], f"i{i}") for i in own])
            for queue in queues.values():
                for a, b in itertools.pairwise(queue):
                    m.add(self.start[b] >= self.start[a] + self.took[a])

    def memory(self) -> None:
        """Add constraint 3."""
        flow, m = self.flow, self.model
        for lane, queues in enumerate(flow.queues):
            held = {s: (h.full, h.late) for s in flow.stages[lane] for h in (flow.held[s],) if h.full or h.late}
            chains = {s: _chain(queues, s) for s in held}
            total = sum(max(held[s]) * len(chains[s][0]) for s in held if len(chains[s]) > 1)
            if total <= flow.room[lane] * (1 + HAIR):
                continue
            if len(held) == 1:
                (s,) = held
                full, late = held[s]
                if len(chains[s]) == 2 or full == late:
                    most = int(flow.room[lane] * (1 + HAIR) / full)
                    for freed, i in zip(chains[s][-1], chains[s][0][most:], strict=False):
                        m.add(self.start[i] >= self.start[freed] + self.took[freed])
                    continue
            intervals, demands = list[Any](), list[int]()
            unit = flow.room[lane] / 1e6
            for s, (full, late) in held.items():
                if len(chains[s]) < 2:
                    continue
                for passes in zip(*chains[s], strict=True):
                    # In full from the forward to the end of the backward's first part, then late.
                    points = [self.start[passes[0]], *(self.start[i] + self.took[i] for i in passes[1:])]
                    for (a, b), size in zip(itertools.pairwise(points), (full, late), strict=False):
                        length = m.new_int_var(0, self.horizon, "")
                        intervals.append(m.new_interval_var(a, length, b, ""))
                        demands.append(math.floor(size / unit * (1 - HAIR)))
            m.add_cumulative(intervals, demands, 1_000_000)

    def cuts(self) -> None:
        """Add cuts: what a lane can run before its first pass backwards, and behind its last forward."""
        m, cuts = self.model, _LaneCuts(self.flow)
        self.idle: list[list[Any]] = [[] for _ in self.flow.lanes]
        """By lane, sums of idle time that do not overlap."""
        for lane, ends in enumerate(cuts.ends):
            if ends is None:
                continue
            for a, b, can in ((ends.first, ends.begins, ends.ahead_s), (ends.last, ends.ends, ends.behind_s)):
                idle = m.new_int_var(0, self.horizon, f"idle{lane}")
                m.add(idle >= self.start[b] - self.start[a] - self.took[a] - math.ceil(can / self.unit * (1 + HAIR)))
                if ends.apart and self.idle[lane]:
                    self.idle[lane][0] += idle
                else:
                    self.idle[lane].append(idle)

    def aims(self) -> None:
        """Add the objective, and that each lane runs all its passes within it."""
        m, flow = self.model, self.flow
        for lane, queues in enumerate(flow.queues):
            stages = {s for s, _ in queues}
            if not stages:
                continue
            update = self.floor(flow.update_s[lane])
            firsts, lasts = [_chain(queues, s)[0][0] for s in stages], [_chain(queues, s)[-1][-1] for s in stages]
            work = sum(self.took[i] for queue in queues.values() for i in queue) + update
            first = self.start[firsts[0]]
            if len(firsts) > 1:
                first = m.new_int_var(0, self.horizon, f"first{lane}")
                m.add_min_equality(first, [self.start[i] for i in firsts])
            end = m.new_int_var(0, self.horizon + update, f"end{lane}")
            for i in lasts:
                m.add(end >= self.start[i] + self.took[i] + update)
            for idle in self.idle[lane] or [0]:
                m.add(end >= first + work + idle)
            m.add(self.value >= (end if self.aim == "end" else end - first))

    def solve(self, limit: float) -> tuple[list[list[int]] | None, float, bool]:
        """The best order that the search finds, what it proves, and whether it came to its end."""
        solver = self.cp.CpSolver()
        solver.parameters.num_workers = 1
        solver.parameters.random_seed = 0
        solver.parameters.max_deterministic_time = limit
        status = solver.solve(self.model)
        closed = status in (self.cp.OPTIMAL, self.cp.INFEASIBLE)
        if status not in (self.cp.OPTIMAL, self.cp.FEASIBLE):
            return None, (self.most * self.unit if closed else 0.0), closed
        at = [solver.value(start) for start in self.start]
        # Passes that take less than a unit may begin together; then the one that is needed goes first.
        found = [sorted((i for queue in queues.values() for i in queue), key=lambda i: (at[i], i)) for queues in self.flow.queues]
        return found, solver.best_objective_bound * self.unit, closed


def _chain(queues: dict[tuple[int, str], tuple[int, ...]], stage: int) -> list[tuple[int, ...]]:
    """A stage's queues, in the order in which a micro-batch goes through them."""
    return sorted((queue for (s, _), queue in queues.items() if s == stage), key=lambda queue: queue[0])


def _unit(flow: Flow, best_s: float) -> float:
    """The largest unit of which all times are multiples, if it is no finer than the solver's own."""
    fine = best_s / UNITS
    times = {*flow.seconds, *flow.update_s, *(seconds for waits in flow.needs for _, seconds in waits)} - {0.0}
    unit = min(times)
    for seconds in times:
        a, b = seconds, unit
        while b > fine / 2:
            a, b = b, abs(a - b * round(a / b))
            if b <= HAIR * best_s:
                b = 0.0
        unit = a
    exact = unit >= fine and all(abs(seconds / unit - round(seconds / unit)) <= 1e-6 for seconds in times)
    return unit if exact else fine
