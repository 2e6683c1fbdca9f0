"""One order for a device that runs several stages: list scheduling.

Each stage keeps the order that its schedule gives it; where two stages could go, the device takes the backward first, then the
stage nearer to the sink: both free memory and feed what waits behind them. Stages without backwards, as those of frozen towers, go
behind others and take turns by micro-batch: nothing holds them back, and all messages of one would lie in memory before the other
begins. Passes for which nobody waits fill the time in which nothing else could go. The orders are found by running all devices
in the seconds that their passes take, greedily and without a device ever waiting for a choice, so the result is an order that
can run. Messages take no time here.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence

from gpp.errors import MalformedProgram
from gpp.graph.op_graph import OpGraph
from gpp.plan.messages import device_messages
from gpp.plan.plan import Plan
from gpp.program.kinds import BACKWARD, FORWARD, KINDS, PASS
from gpp.program.program import Task


def merge(
    plan: Plan,
    graph: OpGraph,
    orders: Sequence[Mapping[int, Sequence[Task]]],
    num_samples: int,
    seconds: Sequence[Mapping[str, float]],
) -> dict[int, list[Task]]:
    """The order of every device.

    Args:
        orders: for each stage, device -> its passes.
        seconds: by stage and kind.

    Raises:
        MalformedProgram: the stages' orders wait for each other.
    """
    tasks, heads, number_of = _numbered(plan, orders)
    users, missing = _users(plan, graph, num_samples, orders, number_of)
    device_of = [device for device, own in heads.items() for first, end in own for _ in range(first, end)]
    # A backward first, then a forward; what nobody waits for fills what is left.
    rank = {kind: (not row.direction, row.holds) for kind, row in KINDS.items()}
    returning = {task.stage for task in tasks if KINDS[task.kind].returns}
    size, far = [stage.microbatch_size for stage in plan.stages], plan.distance_to_sink
    urgency = [(*rank[kind], -1 if s in returning else m * size[s], far[s], s) for s, kind, m in tasks]
    out: dict[int, list[Task]] = {device: [] for device in heads}
    running: dict[int, int] = {}
    wakes = [(0.0, device) for device in sorted(heads)]
    while wakes:
        now = wakes[0][0]
        awake: set[int] = set()
        # All that ends now has ended before anybody chooses.
        while wakes and wakes[0][0] <= now * ROUNDING:
            device = heapq.heappop(wakes)[1]
            awake.add(device)
            ended = running.pop(device, None)
            for user in () if ended is None else users[ended]:
                missing[user] -= 1
                if not missing[user]:
                    awake.add(device_of[user])
        for device in sorted(awake - running.keys()):
            chosen = None
            for head in heads[device]:
                first, end = head
                if first < end and not missing[first] and (chosen is None or urgency[first] < urgency[chosen[0]]):
                    chosen = head
            if chosen is not None:
                number = running[device] = chosen[0]
                chosen[0] += 1
                task = tasks[number]
                out[device].append(task)
                heapq.heappush(wakes, (now + seconds[task.stage][task.kind], device))
    left = [tasks[first] for own in heads.values() for first, end in own if first < end]
    if left:
        names = ", ".join(f"s{task.stage}.{task.kind}{task.microbatch}" for task in left)
        raise MalformedProgram(f"the stages' orders wait for each other; blocked: {names}")
    return out


ROUNDING = 1 + 1e-9
"""Ends that are this close are one instant, or rounding would choose."""


Numbers = list[dict[int, dict[tuple[str, int], int]]]
"""[stage][device]: the number of each pass there, by kind and micro-batch."""


def _numbered(plan: Plan, orders: Sequence[Mapping[int, Sequence[Task]]]) -> tuple[list[Task], dict[int, list[list[int]]], Numbers]:
    """All passes of all devices, each stage's on a device in a row: the passes by number; device -> the first number and the end of
    each of its rows; and the numbers.
    """
    tasks, heads, number_of = list[Task](), dict[int, list[list[int]]](), Numbers({} for _ in plan.stages)
    for device, stages in plan.stages_of_device.items():
        heads[device] = []
        for s in stages:
            first, order = len(tasks), orders[s][device]
            tasks += order
            heads[device].append([first, len(tasks)])
            number_of[s][device] = {(kind, m): number for number, (_, kind, m) in enumerate(order, first)}
    return tasks, heads, number_of


def _users(
    plan: Plan, graph: OpGraph, num_samples: int, orders: Sequence[Mapping[int, Sequence[Task]]], number_of: Numbers
) -> tuple[list[list[int]], list[int]]:
    """Pass -> the passes that need its messages, before any device has an order; and -> the number of messages that it needs."""
    count = sum(len(passes) for own in number_of for passes in own.values())
    users, missing = [list[int]() for _ in range(count)], [0] * count

    def need(made: int | None, read: int | None) -> None:
        if read is not None:
            missing[read] += 1
            if made is not None:
                users[made].append(read)

    backwards = [{task.kind for order in own.values() for task in order if KINDS[task.kind].returns} for own in orders]
    kind_of = [next(iter(kinds), PASS[BACKWARD]) for kinds in backwards]
    kinds = {FORWARD: [PASS[FORWARD]] * len(plan.stages), BACKWARD: kind_of}
    found = device_messages(plan.stages, plan.carried(graph), plan.returning(graph), num_samples)
    for way, (s, a, made), (t, b, read), _, _ in found:
        need(number_of[s][a].get((kinds[way][s], made)), number_of[t][b].get((kinds[way][t], read)))
    return users, missing
