"""One order for a device that runs several stages.

Each stage keeps the order that its schedule gives it; where two stages could go, the device takes the backward first, then the
stage nearer to the sink: both free memory and feed what waits behind them. The orders are found by running all devices
in unit times (a forward 1, a backward 2), greedily and without a device ever waiting for a choice, so the result
is an order that can run.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from gpp.errors import MalformedProgram
from gpp.plan.plan import Plan
from gpp.routing import Message
from gpp.schedules.base import Pass

UNIT_TIMES = {"F": 1, "B": 2}


class Task(NamedTuple):
    """A compute action without its device."""

    stage: int
    kind: str
    microbatch: int


def merge(
    plan: Plan,
    orders: Sequence[Mapping[int, Sequence[Pass]]],
    routes: Mapping[tuple[int, int], Iterable[Message]],
    returning: set[tuple[int, int]],
) -> dict[int, list[Task]]:
    """The order of every device.

    Args:
        orders: of each stage: device -> its passes.
        routes: edge -> who hands which micro-batch to whom.
        returning: edges over which gradients, or an order, come back.

    Raises:
        MalformedProgram: the stages' orders wait for each other.
    """
    needs: dict[tuple[int, Task], set[tuple[int, Task]]] = defaultdict(set)
    for (s, t), route in routes.items():
        for src, src_mb, dst, dst_mb, _, _ in route:
            needs[dst, Task(t, "F", dst_mb)].add((src, Task(s, "F", src_mb)))
            if (s, t) in returning:
                needs[src, Task(s, "B", src_mb)].add((dst, Task(t, "B", dst_mb)))
    users: dict[tuple[int, Task], list[int]] = defaultdict(list)
    for (device, _), found in needs.items():
        for need in found:
            users[need].append(device)
    queues = {
        device: [[Task(s, kind, m) for kind, m in reversed(orders[s][device])] for s in stages]
        for device, stages in plan.stages_of_device.items()
    }
    out: dict[int, list[Task]] = {device: [] for device in queues}
    done: set[tuple[int, Task]] = set()
    running: dict[int, Task] = {}
    wakes = [(0, device) for device in sorted(queues)]
    while wakes:
        now, device = wakes[0]
        awake: set[int] = set()
        # All that ends now has ended before anybody chooses.
        while wakes and wakes[0][0] == now:
            device = heapq.heappop(wakes)[1]
            awake.add(device)
            if device in running:
                finished = device, running.pop(device)
                done.add(finished)
                awake.update(users.pop(finished, ()))
        for device in sorted(awake - running.keys()):
            ready = [queue for queue in queues[device] if queue and needs[device, queue[-1]] <= done]
            if ready:
                queue = min(ready, key=lambda q: (q[-1].kind != "B", plan.distance_to_sink[q[-1].stage], q[-1].stage))
                task = running[device] = queue.pop()
                out[device].append(task)
                heapq.heappush(wakes, (now + UNIT_TIMES[task.kind], device))
    left = [queue[-1] for waiting in queues.values() for queue in waiting if queue]
    if left:
        names = ", ".join(f"s{task.stage}.{task.kind}{task.microbatch}" for task in left)
        raise MalformedProgram(f"the stages' orders wait for each other; blocked: {names}")
    return out
