"""The simulator's metrics for a plan of equal micro-batches, without building its program.

Planners score many candidates. When every stage has the same micro-batch size, each edge carries the
same messages for every micro-batch, so a recurrence over micro-batches gives the very times that
`gpp.simulator.simulate` gives on the program (a test holds the two equal), several times faster.
"""

from __future__ import annotations

from dataclasses import dataclass

from gpp.cost.problem import Problem
from gpp.errors import MalformedProgram
from gpp.plan import Plan
from gpp.program import reduce_groups
from gpp.routing import messages, pieces
from gpp.simulator import ORDER_BYTES
from gpp.timeline import Metrics, Timeline

Passes = list[tuple[str, int]]


def can_score(plan: Plan) -> bool:
    """Whether all stages have one micro-batch size."""
    return len({stage.microbatch_size for stage in plan.stages}) == 1


def score(plan: Plan, problem: Problem, orders: list[Passes]) -> Timeline:
    """Metrics of one training step; no events.

    Args:
        orders: the passes of every stage, as its schedule gives them.

    Raises:
        MalformedProgram: the orders block each other.
    """
    stages, b = plan.stages, plan.stages[0].microbatch_size
    count = plan.minibatch_size // b
    devices = [device for stage in stages for device in stage.devices]
    channels, sent = _channels(plan, problem, b, {device: i for i, device in enumerate(devices)})
    duration = [problem.stage_times(stage.ops, b, stage.devices) for stage in stages]
    of = [s for s, stage in enumerate(stages) for _ in stage.devices]
    took = [{"F": duration[s][0], "B": duration[s][1]} for s in of]
    clock = dict(zip(devices, _run([orders[s] for s in of], took, channels, count), strict=True))
    busy = sum(count * sum(duration[s]) for s in of)
    end, reduced = _finish(plan, problem, clock)
    held = {s: _held(order) * b for s, order in enumerate(orders)}
    memory = {
        device: round(problem.stage_memory(stage.ops, b, len(stage.devices), held[s]))
        for s, stage in enumerate(stages)
        for device in stage.devices
    }
    return Timeline(
        source="predicted",
        metrics=Metrics(
            iteration_s=end,
            throughput_samples_per_s=plan.minibatch_size / end if end else 0.0,
            bubble_fraction=max(0.0, 1.0 - busy / (plan.num_devices * end)) if end else 0.0,
            peak_memory_bytes=memory,
            communication_bytes=round(sent * count + reduced),
            max_in_flight_samples=held,
            weight_versions=dict.fromkeys(range(len(stages)), 1),
        ),
    )


@dataclass(slots=True)
class Channel:
    """A destination (index of a device), seconds on the wire and latency of a message, and when the wire is free again."""

    to: int
    wire_s: float
    latency_s: float
    free_s: float = 0.0


def _channels(plan: Plan, problem: Problem, b: int, index: dict[int, int]) -> tuple[dict[str, list[list[Channel]]], float]:
    """Channels by direction and source device, and the bytes of one micro-batch."""
    out: dict[str, list[list[Channel]]] = {"F": [[] for _ in index], "B": [[] for _ in index]}
    total = 0.0
    cut = [pieces(stage.devices, b, b) for stage in plan.stages]
    for (s, t), tensors in plan.edge_tensors(problem.graph).items():
        fixed = 0.0 if tensors else float(ORDER_BYTES)
        forward = sum(x.bytes_per_sample for x in tensors)
        returning = [x.bytes_per_sample for x in tensors if x.differentiable]
        for route in messages(cut[s], cut[t]):
            link = problem.cluster.link(route.src_device, route.dst_device)
            size = forward * (route.hi - route.lo) + fixed
            src, dst = index[route.src_device], index[route.dst_device]
            out["F"][src].append(Channel(dst, size / link.bandwidth_bytes_per_s, link.latency_s))
            total += size
            if returning or not tensors:
                size = sum(returning) * (route.hi - route.lo) + fixed
                out["B"][dst].append(Channel(src, size / link.bandwidth_bytes_per_s, link.latency_s))
                total += size
    return out, total


def _run(orders: list[Passes], took: list[dict[str, float]], channels: dict[str, list[list[Channel]]], count: int) -> list[float]:
    """When each device has done its passes: a longest path, walked device by device as far as messages allow."""
    n = len(orders)
    arrival = [{"F": [0.0] * count, "B": [0.0] * count} for _ in range(n)]
    indegree = {kind: [0] * n for kind in "FB"}
    for kind in "FB":
        for outs in channels[kind]:
            for channel in outs:
                indegree[kind][channel.to] += 1
    missing = [{kind: [indegree[kind][d]] * count for kind in "FB"} for d in range(n)]
    clock, at = [0.0] * n, [0] * n
    waits: list[tuple[str, int] | None] = [None] * n
    ready = list(range(n - 1, -1, -1))
    while ready:
        d = ready.pop()
        order, now, i, lacks, times, mine = orders[d], clock[d], at[d], missing[d], arrival[d], took[d]
        outs_of = {kind: channels[kind][d] for kind in "FB"}
        while i < len(order):
            kind, m = order[i]
            if lacks[kind][m]:
                waits[d] = order[i]
                break
            when = times[kind][m]
            now = (when if when > now else now) + mine[kind]
            for channel in outs_of[kind]:
                t, free = channel.to, channel.free_s
                channel.free_s = free = (now if now > free else free) + channel.wire_s
                arrived, lacking = arrival[t][kind], missing[t][kind]
                if free + channel.latency_s > arrived[m]:
                    arrived[m] = free + channel.latency_s
                lacking[m] -= 1
                if not lacking[m] and waits[t] == (kind, m):
                    waits[t] = None
                    ready.append(t)
            i += 1
        clock[d], at[d] = now, i
    blocked = [f"{orders[d][at[d]][0]}{orders[d][at[d]][1]} of device {d}" for d in range(n) if at[d] < len(orders[d])]
    if blocked:
        raise MalformedProgram("the passes block each other; blocked: " + ", ".join(blocked))
    return clock


def _finish(plan: Plan, problem: Problem, clock: dict[int, float]) -> tuple[float, float]:
    """End of the step after reductions and updates, and the bytes that the reductions moved."""
    moved, done = 0.0, dict(clock)
    for group in reduce_groups(plan, problem.graph):
        num_bytes = sum(problem.graph.param_of[name].num_bytes for name in group.params)
        end = max(done[d] for d in group.devices) + problem.cluster.allreduce_s(num_bytes, group.devices)
        done.update(dict.fromkeys(group.devices, end))
        moved += num_bytes * 2 * (len(group.devices) - 1)
    for stage in plan.stages:
        trainable = problem.param_bytes(sum(1 << op for op in stage.ops))[0]
        update_s = problem.cost.update_s(trainable, problem.cluster.devices[stage.devices[0]])
        for d in stage.devices:
            done[d] += update_s
    return max(done.values(), default=0.0), moved


def _held(order: Passes) -> int:
    held = most = 0
    for kind, _ in order:
        held += 1 if kind == "F" else -1
        most = max(most, held)
    return most
