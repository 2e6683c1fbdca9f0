"""One order for a device that runs several stages: list scheduling.

Each stage keeps the order that its schedule gives it; where two stages could go, the device takes the backward first, then the
stage nearer to the sink: both free memory and feed what waits behind them. The orders are found by running all devices
in the seconds that their passes take, greedily and without a device ever waiting for a choice, so the result is an order that
can run. Messages take no time here.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Mapping, Sequence

from gpp.errors import MalformedProgram
from gpp.graph.op_graph import OpGraph
from gpp.plan.plan import Plan
from gpp.program.kinds import KINDS
from gpp.program.lower import DevicePass, communication, pass_waits
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
        orders: of each stage: device -> its passes.
        seconds: by stage and kind.

    Raises:
        MalformedProgram: the stages' orders wait for each other.
    """
    needs = pass_waits(*communication(plan, graph, num_samples))
    users: dict[DevicePass, list[int]] = defaultdict(list)
    for (device, _), found in needs.items():
        for need in found:
            users[need].append(device)
    queues = {device: [list(reversed(orders[s][device])) for s in stages] for device, stages in plan.stages_of_device.items()}
    out: dict[int, list[Task]] = {device: [] for device in queues}
    done: set[DevicePass] = set()
    nothing: set[DevicePass] = set()
    running: dict[int, Task] = {}
    wakes = [(0.0, device) for device in sorted(queues)]
    while wakes:
        now, device = wakes[0]
        awake: set[int] = set()
        # All that ends now has ended before anybody chooses.
        while wakes and wakes[0][0] <= now * ROUNDING:
            device = heapq.heappop(wakes)[1]
            awake.add(device)
            if device in running:
                finished = device, running.pop(device)
                done.add(finished)
                awake.update(users.pop(finished, ()))
        for device in sorted(awake - running.keys()):
            ready = [queue for queue in queues[device] if queue and needs.get((device, queue[-1]), nothing) <= done]
            if ready:
                queue = min(ready, key=lambda q: (KINDS[q[-1].kind].holds, plan.distance_to_sink[q[-1].stage], q[-1].stage))
                task = running[device] = queue.pop()
                out[device].append(task)
                heapq.heappush(wakes, (now + seconds[task.stage][task.kind], device))
    left = [queue[-1] for waiting in queues.values() for queue in waiting if queue]
    if left:
        names = ", ".join(f"s{task.stage}.{task.kind}{task.microbatch}" for task in left)
        raise MalformedProgram(f"the stages' orders wait for each other; blocked: {names}")
    return out


ROUNDING = 1 + 1e-9
"""Ends that are this close are one instant, or rounding would choose."""
