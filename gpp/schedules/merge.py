"""One order for a device that runs several stages: list scheduling.

Each stage keeps the order that its schedule gives it; where two stages could go, the device takes the backward first, then the
stage nearer to the sink: both free memory and feed what waits behind them. Gradients of weights, which nobody waits for, fill the
time in which nothing else could go. The orders are found by running all devices
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
from gpp.program.kinds import BACKWARD, FORWARD, KINDS, PASS, WEIGHT_GRADIENTS
from gpp.program.lower import DevicePass
from gpp.program.program import Task
from gpp.routing import copies, messages


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
    users = _users(plan, graph, num_samples, orders)
    missing: dict[DevicePass, int] = defaultdict(int)
    for found in users.values():
        for user in found:
            missing[user] += 1
    queues = {device: [list(reversed(orders[s][device])) for s in stages] for device, stages in plan.stages_of_device.items()}
    # A backward first, then a forward; gradients of weights fill what is left.
    rank = {kind: (kind == WEIGHT_GRADIENTS, row.holds) for kind, row in KINDS.items()}
    urgency = [{kind: (*rank[kind], plan.distance_to_sink[s], s) for kind in KINDS} for s in range(len(plan.stages))]
    out: dict[int, list[Task]] = {device: [] for device in queues}
    running: dict[int, Task] = {}
    wakes = [(0.0, device) for device in sorted(queues)]
    while wakes:
        now = wakes[0][0]
        awake: set[int] = set()
        # All that ends now has ended before anybody chooses.
        while wakes and wakes[0][0] <= now * ROUNDING:
            device = heapq.heappop(wakes)[1]
            awake.add(device)
            if device in running:
                for user in users.get((device, running.pop(device)), ()):
                    missing[user] -= 1
                    awake.add(user[0])
        for device in sorted(awake - running.keys()):
            ready = [queue for queue in queues[device] if queue and not missing.get((device, queue[-1]))]
            if ready:
                task = min(ready, key=lambda queue: urgency[queue[-1].stage][queue[-1].kind]).pop()
                running[device] = task
                out[device].append(task)
                heapq.heappush(wakes, (now + seconds[task.stage][task.kind], device))
    left = [queue[-1] for waiting in queues.values() for queue in waiting if queue]
    if left:
        names = ", ".join(f"s{task.stage}.{task.kind}{task.microbatch}" for task in left)
        raise MalformedProgram(f"the stages' orders wait for each other; blocked: {names}")
    return out


ROUNDING = 1 + 1e-9
"""Ends that are this close are one instant, or rounding would choose."""


def _users(
    plan: Plan, graph: OpGraph, num_samples: int, orders: Sequence[Mapping[int, Sequence[Task]]]
) -> dict[DevicePass, set[DevicePass]]:
    """(device, pass) -> the passes that need a message of its, where no device has an order yet."""
    out: dict[DevicePass, set[DevicePass]] = defaultdict(set)
    cut = [stage.pieces(num_samples) for stage in plan.stages]
    group_of = [{replica[0]: replica for replica in stage.replicas} for stage in plan.stages]
    returning, forward = plan.returning(graph), PASS[FORWARD]
    backwards = [{task.kind for order in own.values() for task in order if KINDS[task.kind].returns} for own in orders]
    kind_of = [next(iter(kinds), PASS[BACKWARD]) for kinds in backwards]
    for s, t in plan.edges:
        back = (s, t) in returning
        for makes, source, reads, sink, _, _ in messages(cut[s], cut[t]):
            makers, readers = group_of[s][makes], group_of[t][reads]
            for maker, reader in copies(makers, readers):
                out[maker, Task(s, forward, source)].add((reader, Task(t, forward, sink)))
            for reader, maker in copies(readers, makers) if back else ():
                out[reader, Task(t, kind_of[t], sink)].add((maker, Task(s, kind_of[s], source)))
    return out
