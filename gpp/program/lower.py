"""From device orders to a whole program: communication, then gradient reduction, clipping and update."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from gpp.graph.op_graph import OpGraph
from gpp.plan.plan import Plan
from gpp.program.action import Action
from gpp.program.kinds import BACKWARD, COPY_IN, COPY_OUT, FORWARD, KINDS, NORM, PASS, RECEIVE, REDUCE, SEND, UPDATE
from gpp.program.program import Program, Task, reduce_groups
from gpp.routing import copies, messages

DevicePass = tuple[int, tuple[int, str, int]]
"""A device, and a pass as in `gpp.program.program.Task`."""

Slots = Mapping[DevicePass, Sequence[Action]]
"""The messages around each pass."""

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
    """
    before, after = communication(plan, graph, num_samples)
    groups = reduce_groups(plan, graph)
    trains = any(KINDS[task.kind].finishes for order in orders.values() for task in order)
    actions: dict[int, tuple[Action, ...]] = {}
    for device, stages in plan.stages_of_device.items():
        order = orders[device]
        updates: dict[Task, list[Action]] = {}
        sums = [Action(REDUCE, stages[0], g) for g, group in enumerate(groups) if device in group.devices]
        sums += [Action(NORM, stages[0], 0)] if global_norm else []
        for t in range(minibatches if trains else 0):
            last = _last_of(order, plan, minibatches - 1 - t)
            updates[last] = [*sums, *(Action(UPDATE, s, t) for s in stages)]
        copying = {s for s in stages if trains and plan.stages[s].offload}
        copies = _copies(order, copying) if copying else {}
        actions[device] = tuple(_interleave(order, device, before, after, updates, copies))
    return Program(num_samples=num_samples, actions=actions, minibatches=minibatches)


def _last_of(order: Sequence[Task], plan: Plan, before: int) -> Task:
    """What a device does last for a mini-batch, so many before the pass's last; with several, it runs one stage."""
    stage, kind, microbatch = order[-1]
    count = -(-plan.minibatch_size // plan.stages[stage].microbatch_size)
    return Task(stage, kind, microbatch - before * count)


def communication(plan: Plan, graph: OpGraph, num_samples: int) -> tuple[Slots, Slots]:
    """Receives to post before, and sends to start after, every pass over so many samples."""
    before: dict[tuple[int, tuple[int, str, int]], list[Action]] = defaultdict(list)
    after: dict[tuple[int, tuple[int, str, int]], list[Action]] = defaultdict(list)
    cut = [stage.pieces(num_samples) for stage in plan.stages]
    returning = plan.returning(graph)
    group_of = [{replica[0]: replica for replica in stage.replicas} for stage in plan.stages]
    forward, backward = PASS[FORWARD], PASS[BACKWARD]
    send, receive, give_back, take_back = SEND[FORWARD], RECEIVE[FORWARD], SEND[BACKWARD], RECEIVE[BACKWARD]
    new = tuple.__new__  # a third of the time of a named tuple's own constructor, and there are many
    for s, t in plan.edges:
        back = (s, t) in returning
        for src_first, src_mb, dst_first, dst_mb, lo, hi in messages(cut[s], cut[t]):
            makers, readers = group_of[s][src_first], group_of[t][dst_first]
            for src, dst in copies(makers, readers):
                after[src, (s, forward, src_mb)].append(new(Action, (send, s, src_mb, t, dst, lo, hi)))
                before[dst, (t, forward, dst_mb)].append(new(Action, (receive, t, dst_mb, s, src, lo, hi)))
            for dst, src in copies(readers, makers) if back else ():
                after[dst, (t, backward, dst_mb)].append(new(Action, (give_back, t, dst_mb, s, src, lo, hi)))
                before[src, (s, backward, src_mb)].append(new(Action, (take_back, s, src_mb, t, dst, lo, hi)))
    return before, after


class _Around(NamedTuple):
    """The copies beside a pass: fetches that are issued before it, a copy out behind it, fetches behind that."""

    before: list[Action]
    after: list[Action]


def _copies(order: Sequence[Task], copying: AbstractSet[int]) -> dict[Task, _Around]:
    """Where the copies of a device stand.

    What a forward made goes at once. It comes back while the pass in front of its backward runs, and no sooner than what came
    before it is used up: a fetch stands behind the last backward of its stage, or, where there is none, before the pass in front.

    Args:
        order: the passes of a device.
        copying: the stages whose copies are meant.
    """
    out: dict[Task, _Around] = defaultdict(lambda: _Around([], []))
    used: dict[int, Task] = {}
    for place, task in enumerate(order):
        row = KINDS[task.kind]
        if task.stage not in copying:
            continue
        if row.holds:
            out[task].after.append(Action(COPY_OUT, task.stage, task.microbatch))
        if row.frees:
            fetch = Action(COPY_IN, task.stage, task.microbatch)
            if task.stage in used:
                out[used[task.stage]].after.append(fetch)
            else:
                out[order[_issued(order, place)]].before.append(fetch)
            used[task.stage] = task
    return out


def _issued(order: Sequence[Task], place: int) -> int:
    """The pass before which the first fetch of a stage is issued: the one in front of its backward, unless that is its forward."""
    task = order[place]
    ahead = max(place - 1, 0)
    return place if order[ahead][::2] == task[::2] else ahead


def _interleave(
    order: Sequence[Task],
    device: int,
    before: Slots,
    after: Slots,
    updates: Mapping[Task, list[Action]],
    copies: Mapping[Task, _Around],
) -> list[Action]:
    """Post every receive some passes ahead, so that it overlaps with them.

    Args:
        updates: what ends a mini-batch, by the pass that it follows.
    """
    out: list[Action] = []
    for task in order[:POSTED_AHEAD]:
        out += before.get((device, task), ())
    for i, task in enumerate(order):
        if i + POSTED_AHEAD < len(order):
            out += before.get((device, order[i + POSTED_AHEAD]), ())
        around = copies.get(task)
        if around:
            out += around.before
        out.append(Action(task.kind, task.stage, task.microbatch))
        out += after.get((device, task), ())
        if around:
            out += around.after
        out += updates.get(task, ())
    return out
