"""The passes of a step for whoever puts them in order: where each runs, how long, what it waits for, what it holds.

Devices that run the same passes are one *lane*. A pass waits for messages; each arrives as long after the end of the pass that
makes it as an empty link takes. Where replicas split a micro-batch, their messages differ, and the quickest counts: what is
proven of a flow then holds for its program too. Gradient sums are left out, and updates are at the end of each lane.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, final

from gpp.cluster import Cluster
from gpp.cost.stage import StageCost
from gpp.cost.together import together
from gpp.graph.op_graph import OpGraph
from gpp.plan.messages import device_messages
from gpp.plan.plan import Plan
from gpp.program.kinds import BACKWARD, FORWARD, KINDS, PASS, pass_seconds
from gpp.program.program import Task
from gpp.simulate.longest_path import LongestPath, Step
from gpp.simulate.messages import message_rates

HAIR = 1e-9
"""Share of a number by which rounding may move it."""


@final
@dataclass(frozen=True, kw_only=True)
class Work:
    """The work that a schedule puts in order: the passes of a plan over some samples.

    Args:
        num_samples: all of them; micro-batches follow from each stage's size.
        bills: the bill of every stage, needed if devices run several stages, or by schedules of which `needs_bills` is true.
        limits: device -> bytes of its memory, for schedules that keep to a cap; None: as much as any needs.
        cluster: for what messages take, where an order depends on seconds; None: nothing.
    """

    plan: Plan
    graph: OpGraph
    num_samples: int
    bills: Sequence[StageCost] | None = None
    limits: Mapping[int, float] | None = None
    cluster: Cluster | None = None

    @property
    def costs(self) -> Sequence[StageCost]:
        """The stages' bills. An order that depends on them must have been given some.

        Raises:
            ValueError: there are none.
        """
        if self.bills is None:
            raise ValueError("this order depends on seconds and bytes: give `bills`")
        return self.bills

    def limit(self, device: int) -> float:
        """Bytes of a device's memory."""
        return math.inf if self.limits is None else self.limits[device]


class Wait(NamedTuple):
    """A pass that another one needs, and the seconds from its end until that one may begin."""

    task: int
    seconds: float


class Bytes(NamedTuple):
    """The bytes of a micro-batch at a stage: in full from its forward on; late between the parts of a backward."""

    full: float
    late: float

    def change(self, kind: str) -> float:
        """Bytes that are held more after a pass than before it."""
        row = KINDS[kind]
        if row.holds:
            return self.full
        if row.frees:
            return -self.full if row.returns else -self.late
        return self.late - self.full


@final
@dataclass(frozen=True, kw_only=True)
class Flow:
    """Passes to be put in order. Each kind of a stage is first-in first-out.

    Args:
        lanes: the devices of each lane.
        tasks: passes, each behind those that it needs.
        lane: the lane of each task.
        seconds: the seconds of each task.
        needs: what each waits for.
        held: bytes of a micro-batch, by stage.
        room: bytes that a lane's devices have for micro-batches.
        update_s: seconds of a lane's updates.
        distance: stages from each stage to the sink, itself included.
    """

    lanes: tuple[tuple[int, ...], ...]
    tasks: tuple[Task, ...]
    lane: tuple[int, ...]
    seconds: tuple[float, ...]
    needs: tuple[tuple[Wait, ...], ...]
    held: tuple[Bytes, ...]
    room: tuple[float, ...]
    update_s: tuple[float, ...]
    distance: tuple[int, ...]

    @cached_property
    def users(self) -> tuple[tuple[Wait, ...], ...]:
        """Task -> the tasks that wait for it, and for how long."""
        out: list[list[Wait]] = [[] for _ in self.tasks]
        for task, waits in enumerate(self.needs):
            for need, seconds in waits:
                out[need].append(Wait(task, seconds))
        return tuple(map(tuple, out))

    @cached_property
    def queues(self) -> tuple[dict[tuple[int, str], tuple[int, ...]], ...]:
        """Lane -> stage and kind -> its tasks, in order."""
        out: list[dict[tuple[int, str], list[int]]] = [defaultdict(list) for _ in self.lanes]
        for i, task in enumerate(self.tasks):
            out[self.lane[i]][task.stage, task.kind].append(i)
        return tuple({key: tuple(own) for key, own in lane.items()} for lane in out)

    @cached_property
    def work_s(self) -> tuple[float, ...]:
        """Seconds of all passes of each lane and its updates."""
        out = list(self.update_s)
        for i, seconds in enumerate(self.seconds):
            out[self.lane[i]] += seconds
        return tuple(out)

    @cached_property
    def stages(self) -> tuple[tuple[int, ...], ...]:
        """Lane -> its stages, the one nearest to the sink first."""
        found = [sorted({stage for stage, _ in queues}) for queues in self.queues]
        return tuple(tuple(sorted(stages, key=lambda s: (self.distance[s], s))) for stages in found)

    def ahead_bytes(self, held: Sequence[int]) -> list[float]:
        """Bytes on each lane with so many micro-batches in full at each stage."""
        return [sum(self.held[s].full * held[s] for s in stages) for stages in self.stages]

    def orders(self, by_lane: Sequence[Sequence[int]]) -> dict[int, list[Task]]:
        """The tasks of every device."""
        return {device: [self.tasks[i] for i in own] for lane, own in enumerate(by_lane) for device in self.lanes[lane]}

    def by_lane(self, orders: Mapping[int, Sequence[Task]]) -> list[list[int]]:
        """The inverse of `orders`. Parts of a backward stand for all of it where a stage has it whole, and for nothing where
        it has none."""
        out = []
        for devices, queues in zip(self.lanes, self.queues, strict=True):
            number = {self.tasks[i]: i for queue in queues.values() for i in queue}
            own = orders[devices[0]]
            whole = (task._replace(kind=_whole(task.kind)) for task in own)
            found = (task if task in number else other for task, other in zip(own, whole, strict=True))
            out.append([number[task] for task in found if task in number])
        return out

    def peaks(self, by_lane: Sequence[Sequence[int]]) -> list[float]:
        """Most bytes that micro-batches hold on each lane."""
        out = []
        for own in by_lane:
            held = most = 0.0
            for i in own:
                held += self.held[self.tasks[i].stage].change(self.tasks[i].kind)
                most = max(most, held)
            out.append(most)
        return out

    @cached_property
    def _arrivals(self) -> tuple[list[tuple[list[Step], tuple[int, ...]]], int]:
        return arrivals(self.needs)

    def path(self, by_lane: Sequence[Sequence[int]]) -> LongestPath | None:
        """The path of an order: nodes are the tasks, resources the lanes; None if the lanes wait for each other."""
        before, slots = self._arrivals
        place, steps, unread = [0] * len(self.lanes), list[Step](), slots - 1
        missing = [len(waits) for waits in self.needs]
        todo, left = list(range(len(self.lanes))), len(self.tasks)
        while todo:
            lane = todo.pop()
            own = by_lane[lane]
            while place[lane] < len(own) and not missing[own[place[lane]]]:
                i = own[place[lane]]
                messages, needs = before[i]
                steps += messages
                steps.append((slots + lane, i, self.seconds[i], 0.0, needs))
                place[lane] += 1
                left -= 1
                for user, _ in self.users[i]:
                    missing[user] -= 1
                    if not missing[user] and self.lane[user] != lane:
                        todo.append(self.lane[user])
        steps += [(slots + lane, unread, self.update_s[lane], 0.0, ()) for lane, own in enumerate(by_lane) if own]
        return None if left else LongestPath(steps, slots, len(self.lanes))

    def with_room(self, room: Sequence[float]) -> Flow:
        """The flow with another limit of memory."""
        return replace(self, room=tuple(room))


def arrivals(waits: Sequence[Sequence[Wait]]) -> tuple[list[tuple[list[Step], tuple[int, ...]]], int]:
    """For a walk over tasks (`gpp.simulate.longest_path`): the messages to each, and the slots that it waits for; and the number of
    slots, of which nobody reads the last.

    A message that takes time has a link of its own: those of a lane do not wait for each other.
    """
    slots, out = len(waits), list[tuple[list[Step], tuple[int, ...]]]()
    for own in waits:
        messages, needs = list[Step](), list[int]()
        for task, seconds in own:
            if seconds:
                messages.append((slots, slots + 1, 0.0, seconds, (task,)))
                slots += 2
            needs.append(slots - 1 if seconds else task)
        out.append((messages, tuple(needs)))
    return out, slots + 1


def flow_of(work: Work, backward: tuple[str, ...] = ()) -> Flow:
    """The passes of a step of a plan.

    Args:
        backward: what stands in place of a backward, where a stage has gradients of weights; none: backwards are whole.
    """
    plan, graph, num_samples, bills = work.plan, work.graph, work.num_samples, work.costs
    lanes, lane_of = _lanes(plan)
    tasks, lane = _tasks(plan, graph, num_samples, lanes, backward)
    number = {(lane[i], task): i for i, task in enumerate(tasks)}
    takes = {(lane[i], stage, KINDS[kind].direction, m): i for i, (stage, kind, m) in enumerate(tasks)}
    needs: list[dict[int, float]] = [{} for _ in tasks]
    rates, cluster = message_rates(plan, graph), work.cluster
    sent = device_messages(plan.stages, plan.carried(graph), plan.returning(graph), num_samples)
    for way, (s, a, made), (t, b, read), lo, hi in sent:
        maker, reader = takes[lane_of[a], s, way, made], needs[takes[lane_of[b], t, way, read]]
        per_sample, fixed = rates[way, s, t]
        seconds = 0.0 if a == b or cluster is None else cluster.link(a, b).transfer_s(per_sample * (hi - lo) + fixed)
        reader[maker] = min(reader.get(maker, seconds), seconds)
    for i, (stage, kind, microbatch) in enumerate(tasks):
        for need in KINDS[kind].needs:
            found = number.get((lane[i], Task(stage, need.kind, microbatch)))
            if found is not None and not need.previous:
                needs[i][found] = 0.0
    passes = [(pass_seconds(bill), pass_seconds(bill, last=True)) for bill in bills]
    sizes = [stage.microbatch_size for stage in plan.stages]
    return Flow(
        lanes=tuple(tuple(devices) for devices in lanes.values()),
        tasks=tuple(tasks),
        lane=tuple(lane),
        seconds=tuple(passes[s][(m + 1) * sizes[s] > num_samples][kind] for s, kind, m in tasks),
        needs=tuple(tuple(Wait(need, seconds) for need, seconds in sorted(waits.items())) for waits in needs),
        held=tuple(
            Bytes(bill.microbatch_bytes, bill.late_bytes) if plan.runs_backward(s, graph) else Bytes(0.0, 0.0)
            for s, bill in enumerate(bills)
        ),
        room=tuple(min(work.limit(device) - _resident(plan, bills, device) for device in devices) for devices in lanes.values()),
        update_s=tuple(sum(bills[s].update_s for s in plan.stages_of_device[devices[0]]) for devices in lanes.values()),
        distance=plan.distance_to_sink,
    )


def _resident(plan: Plan, bills: Sequence[StageCost], device: int) -> float:
    """Bytes on a device that do not depend on an order: all but those of micro-batches in flight, which count from the third on
    where they go to the host."""
    own = [bills[s].memory for s in plan.stages_of_device[device]]
    return together((memory.peak(2) - 2 * memory.microbatch, memory.passing) for memory in own)


def _lanes(plan: Plan) -> tuple[dict[tuple[tuple[int, int], ...], list[int]], dict[int, int]]:
    """Two maps: (stage, first micro-batch) of each lane -> its devices; device -> its lane."""
    out: dict[tuple[tuple[int, int], ...], list[int]] = defaultdict(list)
    for device, stages in sorted(plan.stages_of_device.items()):
        out[tuple((s, plan.stages[s].first(device)) for s in stages)].append(device)
    return out, {device: lane for lane, devices in enumerate(out.values()) for device in devices}


def _tasks(
    plan: Plan, graph: OpGraph, num_samples: int, lanes: Mapping[tuple[tuple[int, int], ...], object], parts: tuple[str, ...]
) -> tuple[list[Task], list[int]]:
    """Passes and their lanes, each behind those that it needs: all forwards by stage, then all backwards from the sink."""
    forward, back = list[tuple[Task, int]](), list[tuple[Task, int]]()
    for s, stage in enumerate(plan.stages):
        count = -(-num_samples // stage.microbatch_size)
        backward: tuple[str, ...] = ()
        if plan.runs_backward(s, graph):
            backward = (plan.has_weight_gradients(s, graph) and parts) or (PASS[BACKWARD],)
        for lane, own in enumerate(lanes):
            for first in (first for t, first in own if t == s):
                numbers = range(first, count, stage.stride)
                forward += [(Task(s, PASS[FORWARD], m), lane) for m in numbers]
                back += [(Task(s, kind, m), lane) for kind in reversed(backward) for m in reversed(numbers)]
    found = [*forward, *reversed(back)]
    return [task for task, _ in found], [lane for _, lane in found]


def _whole(kind: str) -> str:
    """The kind of the pass for which one stands that takes and makes its messages; of others, their own."""
    row = KINDS[kind]
    return row.instead_of if row.instead_of and row.direction else kind
