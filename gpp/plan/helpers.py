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

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from gpp.cost.amounts import RESIDENT_COPIES
from gpp.cost.problem import Problem
from gpp.errors import InvalidPlan, UnsupportedPlan
from gpp.graph.op_graph import OpGraph, mask_of
from gpp.stage import ROUNDING, Stage

Edges = Sequence[tuple[int, int]]
"""Source and destination of every edge between stages, which are in a topological order."""


class Ticks(NamedTuple):
    """Periods in which a stage's passes of micro-batch 0 run; those of micro-batch m run m periods later.

    Args:
        forward, weight: of F and of W.
        inputs: of the stage's own part of I; helpers have theirs one period later.
    """

    forward: int
    inputs: int
    weight: int


def ticks(stages: Sequence[Stage], edges: Edges) -> tuple[Ticks, ...]:
    """When stages with helpers run: forwards as late as those behind them allow, backwards as soon as they can."""
    device = [stage.devices[0] for stage in stages]
    forward = [0] * len(stages)
    for s, t in sorted(edges):
        forward[t] = max(forward[t], forward[s] + (device[s] != device[t]))
    inputs, sinks = list(forward), {*range(len(stages))} - {s for s, _ in edges}
    late = [forward[s] if s in sinks else max(forward) for s in range(len(stages))]
    for s, t in sorted(edges, reverse=True):
        apart = device[s] != device[t]
        helped = (1 + (helper != device[s]) for helper, _ in stages[t].input_share)
        late[s], inputs[s] = min(late[s], late[t] - apart), max(inputs[s], inputs[t] + max(apart, *helped, 0))
    return tuple(Ticks(late[s], inputs[s], inputs[s] + (stage.weight_device is not None)) for s, stage in enumerate(stages))


def delays(stages: Sequence[Stage], edges: Edges) -> tuple[int, ...]:
    """Micro-batches by which the gradients of each stage are late, in a plan with helpers."""
    return tuple(tick.weight - tick.forward for tick in ticks(stages, edges))


def columns(stage: Stage, count: int) -> tuple[tuple[int, int, int], ...]:
    """Who makes which of a stage's input gradients: (device, columns [lo, hi) of the weight), of `count` columns, its own first.

    Shares are rounded to columns, so a device may have none.
    """
    out, at, whole = list[tuple[int, int, int]](), 0, 0.0
    for device, share in ((stage.devices[0], stage.own_input_share), *stage.input_share):
        whole += share
        out.append((device, at, at := round(min(whole, 1.0) * count)))
    return tuple(out)


def gradient_bytes(stage: Stage, graph: OpGraph) -> tuple[float, float]:
    """Bytes of the gradients of a stage's inputs and of its outputs, for each sample."""
    own, inputs, outputs = mask_of(stage.ops), 0.0, 0.0
    for tensor in graph.tensors:
        made, read = own >> tensor.producer & 1, mask_of(tensor.consumers)
        if tensor.differentiable:
            inputs += tensor.bytes_per_sample * bool(read & own and not made)
            outputs += tensor.bytes_per_sample * bool(made and read & ~own)
    return inputs, outputs


def helping_bytes(stage: Stage, problem: Problem) -> Iterator[tuple[int, float]]:
    """Bytes that the helpers of a stage hold: (device, bytes).

    Gradients of weights take their sum, and for two micro-batches, of which one comes and one is in use, what they are made of.
    Gradients of inputs take, for as many, those of the outputs, their own part, and their part of the weights, which comes with
    them: a helper keeps no versions.
    """
    if not stage.helpers:
        return
    samples, trained = RESIDENT_COPIES * stage.microbatch_size, problem.trainable_bytes(stage.ops)
    if stage.weight_device is not None:
        yield stage.weight_device, trained + samples * sum(problem.graph.ops[op].late_bytes for op in stage.ops)
    of_inputs, of_outputs = gradient_bytes(stage, problem.graph)
    for device, share in stage.input_share:
        yield device, share * trained * RESIDENT_COPIES + samples * (of_outputs + share * of_inputs)


def check_helpers(stages: Sequence[Stage], edges: Edges, num_devices: int) -> None:
    """Prove that helpers can help, and that what is in flight is what the delay asks for.

    Raises:
        InvalidPlan: names stage, field, value, rule and fix.
    """
    if not any(stage.helpers for stage in stages):
        return
    for s, stage in enumerate(stages):
        for field, value, rule, fix in _faults(stage, num_devices):
            raise InvalidPlan(f"stage {s}: {field}={value} {rule}. Fix: {fix}")
    for s, (stage, delay) in enumerate(zip(stages, delays(stages, edges), strict=True)):
        if stage.ahead != delay + 1:
            raise InvalidPlan(
                f"stage {s}: in_flight={stage.in_flight} must be {(delay + 1) * stage.microbatch_size}: its gradients are late by "
                f"{delay} micro-batches, and one is in hand. Fix: set it, or plan with strategy/planner=layerpipe"
            )


def refuse_drained(stages: Sequence[Stage]) -> None:
    """Refuse helpers in a pipeline that drains before every update.

    Raises:
        InvalidPlan: names stage, field, value, rule and fix.
    """
    for s, stage in enumerate(stages):
        if stage.helpers:
            raise InvalidPlan(
                f"stage {s}: {_named(stage)} has half of a backward a period later, and a pipeline that drains before every update "
                "would wait for it. Fix: strategy/schedule=no_flush strategy/weights=stash, or a plan without helpers"
            )


def check_runnable(stages: Sequence[Stage]) -> None:
    """Refuse a plan with helpers of a form that has no program.

    Raises:
        UnsupportedPlan: names stage, field, value, rule and fix.
    """
    if not any(stage.helpers for stage in stages):
        return
    size = stages[0].microbatch_size
    for s, stage in enumerate(stages):
        for field, value, fits, rule, fix in (
            (
                "devices",
                list(stage.devices),
                len(stage.devices) == 1,
                "are several, beside a stage with helpers, whose devices go from period to period",
                "one device a stage",
            ),
            (
                "microbatch_size",
                stage.microbatch_size,
                stage.microbatch_size == size,
                f"is not {size}, as of stage 0: in a plan with helpers a period is one micro-batch of every stage",
                "one micro-batch size",
            ),
            (
                "offload",
                list(stage.offload[:8]),
                not stage.offload,
                "stands beside a stage with helpers, in whose order of passes copies to the host have no place",
                "strategy/memory=keep",
            ),
        ):
            if not fits:
                raise UnsupportedPlan(f"stage {s}: {field}={value} {rule}. Fix: {fix}")


def _named(stage: Stage) -> str:
    """The field that names a helper, and its value."""
    if stage.weight_device is not None:
        return f"weight_device={stage.weight_device}"
    return f"input_share={[list(pair) for pair in stage.input_share]}"


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
    keep = "leave it out (strategy/memory=keep)"
    for field, value, fits, fix in (
        ("devices", list(stage.devices), len(stage.devices) == 1, "one device a stage"),
        ("k", stage.k, stage.k == 1, "k=1"),
        ("recompute", list(stage.recompute[:8]), not stage.recompute, keep),
        ("offload", list(stage.offload[:8]), not stage.offload, keep),
    ):
        if not fits:
            yield field, value, "has no place in a plan with helpers: each stage has one device, k=1, and keeps what it makes", fix
