"""Stages whose backward is made in part by other devices: their helpers (LayerPipe).

A backward has two halves: I makes the gradients of a stage's inputs, W those of its weights. `Stage.weight_device` makes all of W;
`Stage.input_share` makes parts of I, by columns of the weights. A helper may be the device of another stage.

**Delay.** In a pipeline that does not drain a gradient is late by the updates between the weights of its forward and its own
update: `Stage.in_flight` less one micro-batch, for one micro-batch an update. Where devices alternate between forwards and
backwards, as in 1F1B, stage k of a chain of D is late by D - 1 - k (`gpp.plan.in_flight`). With helpers devices run side by side:
in a period each does once what it has to do for one micro-batch, with what others have made in periods before (`ticks`). So the
way from one device to the next costs a period, and so does the way back: stage k is late by 2 (D - 1 - k), and by one more if its
W is with a helper, which has it a period later. Source: LayerPipe2 (arXiv 2512.08160), which derives 2 S for S stages behind by
retiming; what helpers add is ours.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from gpp.cost.amounts import RESIDENT_COPIES
from gpp.cost.problem import Problem
from gpp.errors import InvalidPlan, UnsupportedPlan
from gpp.graph.op_graph import OpGraph
from gpp.plan.stage import Stage

if TYPE_CHECKING:
    from gpp.plan.plan import Plan

ROUNDING = 1e-9
"""By which shares may add up to more than the whole."""


class Ticks(NamedTuple):
    """Periods in which a stage's passes of micro-batch 0 run; those of micro-batch m run m periods later.

    Args:
        forward, weight: of F and of W.
        inputs: of the stage's own part of I; helpers have theirs one period later.
    """

    forward: int
    inputs: int
    weight: int


def ticks(plan: Plan) -> tuple[Ticks, ...]:
    """When the stages of a plan with helpers run: forwards as late as those behind them allow, backwards as soon as they can."""
    device = [stage.devices[0] for stage in plan.stages]
    stages = range(len(plan.stages))
    forward = [0] * len(plan.stages)
    for t in stages:
        forward[t] = max((forward[s] + (device[s] != device[t]) for s in plan.predecessors[t]), default=0)
    inputs = list(forward)
    for s in reversed(stages):
        for t in plan.successors[s]:
            helped = (1 + (helper != device[s]) for helper, _ in plan.stages[t].input_share)
            inputs[s] = max(inputs[s], inputs[t] + max(device[s] != device[t], *helped, 0))
        forward[s] = min((forward[t] - (device[s] != device[t]) for t in plan.successors[s]), default=forward[s])
    return tuple(Ticks(forward[s], inputs[s], inputs[s] + (plan.stages[s].weight_device is not None)) for s in stages)


def delays(plan: Plan) -> tuple[int, ...]:
    """Micro-batches by which the gradients of each stage of a plan with helpers are late."""
    return tuple(tick.weight - tick.forward for tick in ticks(plan))


def helping_bytes(plan: Plan, problem: Problem) -> Iterator[tuple[int, float]]:
    """Bytes that helpers hold: (device, bytes) for each of them and each stage that it helps.

    Gradients of weights take their sum, and for two micro-batches, of which one comes and one is in use, what they are made of.
    Gradients of inputs take, for as many, those of the outputs and their own part, and their part of the weights in each version
    that the stage keeps.
    """
    graph, weights = problem.graph, problem.regime.weights
    gradients = gradient_bytes(plan, graph) if plan.helped else ()
    for s, stage in enumerate(plan.stages):
        if not stage.helpers:
            continue
        samples, trained = RESIDENT_COPIES * stage.microbatch_size, problem.trainable_bytes(stage.ops)
        if stage.weight_device is not None:
            yield stage.weight_device, trained + samples * sum(graph.ops[op].late_bytes for op in stage.ops)
        of_inputs, of_outputs = gradients[s]
        for device, share in stage.input_share:
            yield device, share * trained * weights.copies(plan.position(s)) + samples * (of_outputs + share * of_inputs)


def gradient_bytes(plan: Plan, graph: OpGraph) -> list[tuple[float, float]]:
    """By stage, bytes of the gradients of its inputs and of its outputs, for each sample."""
    inputs, outputs = [0.0] * len(plan.stages), [0.0] * len(plan.stages)
    returning = plan.returning(graph)
    for (s, t), tensors in plan.edge_tensors(graph).items():
        if (s, t) in returning:
            size = sum(tensor.bytes_per_sample for tensor in tensors if tensor.differentiable)
            outputs[s] += size
            inputs[t] += size
    return list(zip(inputs, outputs, strict=True))


def check_helpers(plan: Plan, num_devices: int, *, drains: bool | None = None) -> None:
    """Prove that the helpers of a plan can help.

    Args:
        drains: whether the pipeline is empty before every update; None if that is not known.

    Raises:
        InvalidPlan: names stage, field, value, rule and fix.
    """
    if not plan.helped:
        return
    for s, stage in enumerate(plan.stages):
        for field, value, rule, fix in _faults(stage, num_devices):
            raise InvalidPlan(f"stage {s}: {field}={value} {rule}. Fix: {fix}")
    if drains:
        s = next(s for s, stage in enumerate(plan.stages) if stage.helpers)
        raise InvalidPlan(
            f"stage {s}: the helpers {list(plan.stages[s].helpers)} have half of it a period later, which a pipeline "
            "drains before every update would wait for. Fix: strategy/schedule=no_flush strategy/weights=stash, or a plan without "
            "helpers"
        )
    for s, (stage, delay) in enumerate(zip(plan.stages, delays(plan), strict=True)):
        if stage.ahead != delay + 1:
            raise InvalidPlan(
                f"stage {s}: in_flight={stage.in_flight} must be {(delay + 1) * stage.microbatch_size}: its gradients are late by "
                f"{delay} micro-batches, and one is in hand. Fix: set it, or plan with strategy/planner=layerpipe"
            )


def refuse_helpers(plan: Plan) -> None:
    """Refuse a plan with helpers where a program is to be made, or run.

    Raises:
        UnsupportedPlan: names stage, field, value, rule and fix.
    """
    for s, stage in enumerate(plan.stages):
        if stage.helpers:
            field, value = (
                ("weight_device", stage.weight_device)
                if stage.weight_device is not None
                else (
                    "input_share",
                    [list(pair) for pair in stage.input_share],
                )
            )
            raise UnsupportedPlan(
                f"stage {s}: {field}={value}: engines run both halves of a backward on the devices of their stage, so a plan with "
                "helpers is predicted only. Fix: mode=plan or mode=compare, or a strategy without helpers (strategy=pipedream)"
            )


def _faults(stage: Stage, num_devices: int) -> Iterator[tuple[str, object, str, str]]:
    """What is wrong with a stage of a plan with helpers: field, value, rule, fix."""
    shares = [list(pair) for pair in stage.input_share]
    for field, value, devices in (
        ("weight_device", stage.weight_device, [stage.weight_device] if stage.weight_device is not None else []),
        ("input_share", shares, [device for device, _ in stage.input_share]),
    ):
        if any(device in stage.devices for device in devices):
            yield field, value, f"names a device of the stage itself, {list(stage.devices)}", "leave it out, or name another device"
        if any(not 0 <= device < num_devices for device in devices):
            yield field, value, f"must name devices out of 0..{num_devices - 1}", "name one of these, or use more devices"
        if len(set(devices)) < len(devices):
            yield field, value, "names a device twice", "give one share a device"
    total = sum(share for _, share in stage.input_share)
    if any(share <= 0.0 for _, share in stage.input_share) or total > 1.0 + ROUNDING:
        yield "input_share", shares, f"has shares above 0 that add up to 1 at most, not {total:g}", "give each helper its part of 1"
    alone = "helpers help stages of one device that keep what they make: "
    for field, value, fits in (
        ("devices", list(stage.devices), len(stage.devices) == 1),
        ("k", stage.k, stage.k == 1),
        ("recompute", list(stage.recompute[:8]), not stage.recompute),
        ("offload", list(stage.offload[:8]), not stage.offload),
    ):
        if not fits:
            yield field, value, f"{alone}one device, k=1, nothing recomputed or on the host", "leave it out of plans with helpers"
