"""Programs of plans with helpers (`gpp.plan.helpers`): the order of every device, and where sums and updates stand.

A device goes from period to period (`gpp.plan.helpers.ticks`). In a period it has its forwards, by stage, then its backwards, from
the last stage to the first, then the gradients of weights, its own and those that it makes for others; last come, by stage, the
sums and updates of the mini-batches that end in the period. A helper has an update, too: there it lets go of the sum.

Everything that an action waits for stands in an earlier period, or in this one before it: whatever the order of the devices within
a period, nobody waits in a circle. `gpp.program.waits` proves it of every program that is made.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from gpp.graph.op_graph import OpGraph
from gpp.plan.helpers import Ticks, ticks
from gpp.plan.plan import Plan
from gpp.program.action import Action
from gpp.program.kinds import (
    BACKWARD,
    FORWARD,
    HELPED_INPUTS,
    HELPED_WEIGHTS,
    HELPING,
    HELPING_INPUTS,
    INPUT_GRADIENTS,
    PASS,
    RECEIVE,
    REDUCE,
    SEND,
    SEND_PART,
    UPDATE,
    WEIGHT_GRADIENTS,
    Direction,
)
from gpp.program.program import Task, summed_stages
from gpp.stage import Stage

FORWARDS, BACKWARDS, WEIGHTS = range(3)
"""Parts of a period."""


class _Place(NamedTuple):
    """Where a task stands in its device's order, and the task."""

    period: int
    part: int
    turn: int
    task: Task


def orders(plan: Plan, graph: OpGraph, num_samples: int) -> dict[int, list[Task]]:
    """The passes of every device of a plan with helpers, over so many samples."""
    return {device: [place.task for place in own] for device, own in _places(plan, graph, num_samples).items()}


def endings(plan: Plan, graph: OpGraph, num_samples: int, minibatches: int) -> dict[int, dict[Task, list[Action]]]:
    """Of every device: the sums and updates that stand behind each of its passes."""
    places, group_of = _places(plan, graph, num_samples), {s: g for g, s in enumerate(summed_stages(plan))}
    latest = {device: {place.period: place.task for place in own} for device, own in places.items()}
    out: dict[int, dict[Task, list[Action]]] = {device: defaultdict(list) for device in places}
    for s, (stage, tick) in enumerate(zip(plan.stages, ticks(plan.stages, plan.edges), strict=True)):
        count = -(-plan.minibatch_size // stage.microbatch_size)
        for t in range(minibatches):
            for device in (stage.devices[0], *stage.helpers):
                adds = device in (stage.devices[0], stage.weight_device)
                ends = _ends(plan, s, tick, graph) if adds else tick.inputs + 1
                sums = [Action(REDUCE, s, group_of[s])] if s in group_of and adds else []
                out[device][latest[device][ends + (t + 1) * count - 1]] += [*sums, Action(UPDATE, s, t)]
    return out


def operand_messages(plan: Plan, num_samples: int) -> list[tuple[tuple[int, Action], tuple[int, Action]]]:
    """What helpers are sent: the sender's device and its action, and the receiver's."""
    out = []
    for s, stage in enumerate(plan.stages):
        own = stage.devices[0]
        sent = [] if stage.weight_device is None else [(HELPING, stage.weight_device)]
        for way, helper in [*sent, *((HELPING_INPUTS, device) for device, _ in stage.input_share)]:
            for _, microbatch, lo, hi in stage.pieces(num_samples):
                send = Action(SEND[way], s, microbatch, s, helper, lo, hi)
                out.append(((own, send), (helper, Action(RECEIVE[way], s, microbatch, s, own, lo, hi))))
    return out


def returned_by(stage: Stage) -> list[tuple[int, str, Direction]]:
    """Who sends the gradients of a stage's inputs back, all of them or parts: device, kind of the send, direction of the pass."""
    own = [(stage.devices[0], SEND[BACKWARD], BACKWARD)] if stage.own_input_share else []
    return [*own, *((device, SEND_PART, HELPING_INPUTS) for device, _ in stage.input_share)]


def _ends(plan: Plan, s: int, tick: Ticks, graph: OpGraph) -> int:
    """The period in which a stage is done with micro-batch 0."""
    return tick.weight if plan.runs_backward(s, graph) else tick.forward


def _places(plan: Plan, graph: OpGraph, num_samples: int) -> dict[int, list[_Place]]:
    """The passes of every device, in order."""
    out: dict[int, list[_Place]] = {device: [] for device in plan.work_of_device}
    for s, (stage, tick) in enumerate(zip(plan.stages, ticks(plan.stages, plan.edges), strict=True)):
        own, helper = stage.devices[0], stage.weight_device
        passes = [(own, tick.forward, FORWARDS, s, PASS[FORWARD])]
        if stage.helpers:
            passes.append((own, tick.inputs, BACKWARDS, -s, INPUT_GRADIENTS))
            passes.append((own, tick.weight, WEIGHTS, -s, WEIGHT_GRADIENTS))
            passes += [(device, tick.inputs + 1, BACKWARDS, -s, HELPED_INPUTS) for device, _ in stage.input_share]
            passes += [] if helper is None else [(helper, tick.weight, WEIGHTS, -s, HELPED_WEIGHTS)]
        elif plan.runs_backward(s, graph):
            passes.append((own, tick.inputs, BACKWARDS, -s, PASS[BACKWARD]))
        for m in range(-(-num_samples // stage.microbatch_size)):
            for device, first, part, turn, kind in passes:
                out[device].append(_Place(first + m, part, turn, Task(s, kind, m)))
    return {device: sorted(own) for device, own in out.items()}
