"""From device orders to a whole program: communication, then gradient reduction, clipping and update."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from gpp.graph.op_graph import OpGraph
from gpp.plan.messages import device_messages
from gpp.plan.plan import Plan
from gpp.program.added import lowerings
from gpp.program.kinds import BACKWARD, KINDS, NORM, RECEIVE, REDUCE, SEND, UPDATE, Action, Direction
from gpp.program.program import Program, Task, reduce_groups
from gpp.routing import new

Slots = Mapping[tuple[int, tuple[int, Direction, int]], Sequence[Action]]
"""(device, (stage, direction, micro-batch)) -> the messages before or after that pass."""

POSTED_AHEAD = 2
"""Passes before the one that needs a message at which its receive is posted.

One is too late where the pass before is short: the sender's data then waits for the receiver's buffer, because gloo moves nothing
until both sides have met. More holds buffers for nothing: what is in flight bounds them already. Cards need another order
(`gpp.program.global_order`).
"""


def lower(
    plan: Plan,
    graph: OpGraph,
    orders: Mapping[int, Sequence[Task]],
    num_samples: int,
    *,
    minibatches: int = 1,
    global_norm: bool = False,
) -> Program:
    """The program in which every device runs its passes in the order given.

    If there are backwards, reductions and the optimizer's step follow each mini-batch; else it is an evaluation.

    Args:
        orders: device -> its passes, micro-batches by the numbers of their stage (`gpp.schedules.base.AbstractSchedule.orders`).
        num_samples: all of them.
        minibatches: how many mini-batches those are; more than one for a pipeline that does not drain.
        global_norm: sum the squares of all gradients before the update, to clip by their norm.

    >>> forwards = lower(plan, graph, {0: [Task(0, "F", 0)], 1: [Task(1, "F", 0)]}, num_samples=1)
    >>> print(forwards.to_text(), end="")
    samples 1 minibatches 1
    s0.F0@d0 s0.SF0>s1.d1[0:1]@d0
    s1.RF0<s0.d0[0:1]@d1 s1.F0@d1
    """
    before, after = communication(plan, graph, num_samples)
    groups = reduce_groups(plan, graph)
    trains = any(KINDS[task.kind].finishes for order in orders.values() for task in order)
    actions: dict[int, tuple[Action, ...]] = {}
    ends: dict[int, Mapping[Task, Sequence[Action]]] = {}
    for part in lowerings(plan) if trains else ():
        ends |= part.endings(plan, graph, num_samples, minibatches)
    for device, stages in plan.work_of_device.items():
        order = orders.get(device, ())
        if device in ends or not order:
            actions[device] = tuple(_interleave(order, device, before, after, ends.get(device, {})))
            continue
        updates: dict[Task, list[Action]] = {}
        sums = [Action(REDUCE, stages[0], g) for g, group in enumerate(groups) if device in group.devices]
        sums += [Action(NORM, stages[0], 0)] if global_norm else []
        stage, kind, latest = order[-1]
        count = -(-plan.minibatch_size // plan.stages[stage].microbatch_size)
        for t in range(minibatches if trains else 0):
            # A device with several mini-batches runs one stage.
            last = Task(stage, kind, latest - (minibatches - 1 - t) * count)
            updates[last] = [*sums, *(Action(UPDATE, s, t) for s in stages)]
        actions[device] = tuple(_interleave(order, device, before, after, updates))
    program = Program(num_samples=num_samples, actions=actions, minibatches=minibatches)
    for part in lowerings(plan):
        program = part.lower(plan, graph, program)
    return program


def communication(plan: Plan, graph: OpGraph, num_samples: int) -> tuple[Slots, Slots]:
    """The receives before each pass and the sends after it, over `num_samples` samples."""
    before: dict[tuple[int, tuple[int, Direction, int]], list[Action]] = defaultdict(list)
    after: dict[tuple[int, tuple[int, Direction, int]], list[Action]] = defaultdict(list)
    added = lowerings(plan)
    returns = {s: made for part in added for s, made in part.returns(plan).items()}
    found = device_messages(plan.stages, plan.carried(graph), plan.returning(graph), num_samples)
    for way, (s, src, made), (t, dst, read), lo, hi in found:
        if way == BACKWARD and s in returns:
            for maker, kind, own in returns[s]:
                after[maker, (s, own, made)].append(Action(kind, s, made, t, dst, lo, hi))
                before[dst, (t, way, read)].append(Action(RECEIVE[way], t, read, s, maker, lo, hi))
            continue
        after[src, (s, way, made)].append(new(Action, (SEND[way], s, made, t, dst, lo, hi)))
        before[dst, (t, way, read)].append(new(Action, (RECEIVE[way], t, read, s, src, lo, hi)))
    for way, src, sent, dst, received in (message for part in added for message in part.messages(plan, num_samples)):
        after[src, (sent.stage, way, sent.microbatch)].append(sent)
        before[dst, (received.stage, KINDS[received.kind].direction, received.microbatch)].append(received)
    return before, after


def _interleave(
    order: Sequence[Task],
    device: int,
    before: Slots,
    after: Slots,
    updates: Mapping[Task, Sequence[Action]],
) -> list[Action]:
    """Post every receive some passes ahead, so that it overlaps with them.

    Args:
        updates: what ends a mini-batch, by the pass that it follows.
    """
    # The first of two stages under 1F1B with four micro-batches. Each column is a round of the loop below:
    #
    #     pass         F0     F1       B0        F2       B1        F3     B2    B3
    #
    #     posted [1]   RB0             RB1                RB2       RB3
    #     done   [2]   F0     F1       B0        F2       B1        F3     B2    B3
    #     sent   [3]   SF0    SF1                SF2                SF3
    #     ended  [4]                                                             U0
    #
    # RB0 belongs to B0, two passes later; so does every receive, whatever the passes between are. The line that is written:
    #
    #     RB0 F0 SF0  F1 SF1  RB1 B0  F2 SF2  RB2 B1  RB3 F3 SF3  B2  B3 U0
    out: list[Action] = []
    passes = [(device, (stage, KINDS[kind].direction, microbatch)) for stage, kind, microbatch in order]
    for what in passes[:POSTED_AHEAD]:
        out += before.get(what, ())
    for i, (task, what) in enumerate(zip(order, passes, strict=True)):
        if i + POSTED_AHEAD < len(order):
            out += before.get(passes[i + POSTED_AHEAD], ())  # [1]
        out.append(new(Action, (task.kind, task.stage, task.microbatch, -1, -1, 0, 0)))  # [2]
        out += after.get(what, ())  # [3]
        out += updates.get(task, ())  # [4]
    return out
