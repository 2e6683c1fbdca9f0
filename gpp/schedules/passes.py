"""From compute orders to a whole program: communication, then gradient reduction, clipping and update."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from gpp.graph.op_graph import OpGraph
from gpp.plan.plan import Plan
from gpp.program.program import Action, Program, reduce_groups
from gpp.routing import Message, copies, messages
from gpp.schedules.base import AbstractSchedule, Pass
from gpp.schedules.merge import Task, merge

Slots = dict[tuple[int, Task], list[Action]]
"""(device, compute action) -> messages around it."""

POSTED_AHEAD = 2
"""Compute actions before the one that needs a message at which its receive is posted.

One is too late where the previous action is short: the sender's data then waits for the receiver's buffer, because gloo and NCCL
move nothing until both sides have met. More holds buffers for nothing: what is in flight bounds them already.
"""


def lower(
    plan: Plan,
    graph: OpGraph,
    schedule: AbstractSchedule,
    num_samples: int | None = None,
    *,
    minibatches: int = 1,
    global_norm: bool = False,
) -> Program:
    """The program of one pass over `num_samples` samples (default: so many mini-batches).

    With a schedule that has backwards, reductions and the optimizer's step follow each mini-batch; one without is an evaluation. A
    stage in which nothing is differentiated (a frozen tower's) has forwards only.

    Args:
        minibatches: more than one for a schedule that does not drain.
        global_norm: sum the squares of all gradients before the update, to clip by their norm.
    """
    total = plan.minibatch_size * minibatches if num_samples is None else num_samples
    cut = [stage.pieces(total) for stage in plan.stages]
    routes = {(s, t): messages(cut[s], cut[t]) for s, t in plan.edges}
    returning = plan.returning(graph)
    before, after = _communication(plan, routes, returning)
    groups = reduce_groups(plan, graph)
    orders = [_orders(plan, s, schedule, -(-total // stage.microbatch_size)) for s, stage in enumerate(plan.stages)]
    trains = any(kind == "B" for own in orders for order in own.values() for kind, _ in order)
    for s, own in enumerate(orders):
        if not plan.runs_backward(s, graph):
            orders[s] = {device: [(kind, m) for kind, m in order if kind != "B"] for device, order in own.items()}
    merged = merge(plan, orders, routes, returning) if plan.shares_devices else {}
    actions: dict[int, tuple[Action, ...]] = {}
    for device, stages in plan.stages_of_device.items():
        order = merged[device] if merged else [Task(stages[0], kind, m) for kind, m in orders[stages[0]][device]]
        updates: dict[Task, list[Action]] = {}
        sums = [Action("R", stages[0], g) for g, group in enumerate(groups) if device in group.devices]
        sums += [Action("N", stages[0], 0)] if global_norm else []
        for t in range(minibatches if trains else 0):
            last = _last_of(order, plan, minibatches - 1 - t)
            updates[last] = [*sums, *(Action("U", s, t) for s in stages)]
        actions[device] = tuple(_interleave(order, device, before, after, updates))
    return Program(num_samples=total, actions=actions, minibatches=minibatches)


def _orders(plan: Plan, s: int, schedule: AbstractSchedule, count: int) -> dict[int, list[Pass]]:
    """The passes of each device of a stage of `count` micro-batches, in order; micro-batches by the stage's numbers."""
    stage = plan.stages[s]
    if stage.round_robin_degree == 1:
        return dict.fromkeys(stage.devices, schedule.order(plan, s, count))
    out: dict[int, list[Pass]] = {}
    for r, replica in enumerate(stage.replicas):
        own = range(r, count, stage.round_robin_degree)
        order: list[Pass] = [(kind, own[m]) for kind, m in schedule.order(plan, s, len(own))]
        for device in replica:
            out[device] = order
    return out


def _last_of(order: list[Task], plan: Plan, before: int) -> Task:
    """What a device does last for a mini-batch, so many before the pass's last; with several, it runs one stage."""
    stage, kind, microbatch = order[-1]
    count = -(-plan.minibatch_size // plan.stages[stage].microbatch_size)
    return Task(stage, kind, microbatch - before * count)


def _communication(
    plan: Plan, routes: dict[tuple[int, int], list[Message]], returning: set[tuple[int, int]]
) -> tuple[Slots, Slots]:
    """Receives to post before, and sends to start after, every compute action."""
    before: Slots = defaultdict(list)
    after: Slots = defaultdict(list)
    group_of = [{replica[0]: replica for replica in stage.replicas} for stage in plan.stages]
    for (s, t), route in routes.items():
        for src_first, src_mb, dst_first, dst_mb, lo, hi in route:
            for src, dst in copies(group_of[s][src_first], group_of[t][dst_first]):
                after[src, Task(s, "F", src_mb)].append(Action("SF", s, src_mb, t, dst, lo, hi))
                before[dst, Task(t, "F", dst_mb)].append(Action("RF", t, dst_mb, s, src, lo, hi))
                if (s, t) in returning:
                    after[dst, Task(t, "B", dst_mb)].append(Action("SB", t, dst_mb, s, src, lo, hi))
                    before[src, Task(s, "B", src_mb)].append(Action("RB", s, src_mb, t, dst, lo, hi))
    return before, after


def _interleave(order: list[Task], device: int, before: Slots, after: Slots, updates: Mapping[Task, list[Action]]) -> list[Action]:
    """Post every receive some compute actions ahead, so that it overlaps with them.

    Args:
        updates: what ends a mini-batch, by the compute action that it follows.
    """
    out: list[Action] = []
    for task in order[:POSTED_AHEAD]:
        out += before.get((device, task), ())
    for i, task in enumerate(order):
        if i + POSTED_AHEAD < len(order):
            out += before.get((device, order[i + POSTED_AHEAD]), ())
        out.append(Action(task.kind, task.stage, task.microbatch))
        out += after.get((device, task), ())
        out += updates.get(task, ())
    return out
