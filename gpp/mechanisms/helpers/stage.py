"""Stages whose backward is made in part by other devices: their helpers (LayerPipe).

A backward has two halves: I makes the gradients of a stage's inputs, W those of its weights. `Helpers.weight_device` makes all of
W; those of `Helpers.input_share` make parts of I, by columns of the weights. A helper may be the device of another stage.

**Delay.** In a pipeline that does not drain a gradient is late by the updates between the weights of its forward and its own
update: `Stage.in_flight` less one micro-batch, for one micro-batch an update. Where devices alternate between forwards and
backwards, as in 1F1B, stage k of a chain of D is late by D - 1 - k (`gpp.plan.in_flight`). With helpers devices run side by side:
in a period each does once what it has to do for one micro-batch, with what others have made in periods before (`ticks`). So the
way from one device to the next costs a period, and so does the way back: stage k is late by 2 (D - 1 - k), and by one more if its
W is with a helper, which has it a period later. Source: LayerPipe2 (arXiv 2512.08160), which derives 2 S for S stages behind by
retiming; what helpers add is ours.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, NamedTuple

from pydantic import Field

from gpp.errors import InvalidPlan
from gpp.mechanisms.marks.stage import marks_of
from gpp.mechanisms.split_backward.kinds import HALVES
from gpp.report.draw import text
from gpp.settings import Natural, NotNegative
from gpp.stage import AbstractStageValue, Edges, EdgeTensors, Stage

ROUNDING = 1e-9
"""By which shares may miss the whole that they add up to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Helpers(AbstractStageValue):
    """Devices that make parts of a stage's backward beside its own.

    Args:
        weight_device: makes the gradients of the stage's weights; None: its own device does.
        input_share: who makes parts of the gradients of its inputs, as (device, share); what is left of 1 is its own device's.
    """

    name: ClassVar[str] = "helpers"
    periodic: ClassVar[bool] = True
    backward: ClassVar[tuple[str, ...]] = HALVES
    earlier: ClassVar[Mapping[str, str]] = {"weight_device": "weight_device", "input_share": "input_share"}

    weight_device: Annotated[Natural | None, Field(exclude_if=lambda device: device is None)] = None
    input_share: Annotated[tuple[tuple[Natural, NotNegative], ...], Field(exclude_if=lambda shares: not shares)] = ()

    @property
    def acts(self) -> bool:
        return True

    @property
    def beside(self) -> tuple[int, ...]:
        return tuple(sorted({*self.adding, *(device for device, _ in self.input_share)}))

    @property
    def adding(self) -> tuple[int, ...]:
        return () if self.weight_device is None else (self.weight_device,)

    @property
    def predicted_only(self) -> bool:
        return bool(self.input_share)

    @property
    def own_input_share(self) -> float:
        """The part of the gradients of its inputs that the stage's own device makes."""
        left = 1.0 - sum(share for _, share in self.input_share)
        return left if left > ROUNDING else 0.0

    @property
    def written(self) -> str:
        """A field that names a helper, and its value."""
        if self.weight_device is not None:
            return f"weight_device={self.weight_device}"
        return f"input_share={[list(pair) for pair in self.input_share]}"

    def words(self) -> str:
        of_weights = [f"W on d{device}" for device in self.adding]
        return ", ".join([*of_weights, *(f"{text.significant(100 * share, 2)} % of I on d{d}" for d, share in self.input_share)])

    @classmethod
    def check_plan(cls, stages: tuple[Stage, ...], edges: EdgeTensors, num_devices: int, *, trains: bool) -> None:
        """Prove that helpers can help, and that what is in flight is what the delay asks for."""
        for s, stage in enumerate(stages):
            for field, value, rule, fix in _faults(stage, stages[0].microbatch_size, num_devices):
                raise InvalidPlan(f"stage {s}: {field}={value} {rule}. Fix: {fix}")
        for s, (stage, delay) in enumerate(zip(stages, delays(stages, tuple(edges)), strict=True)):
            if stage.ahead != delay + 1:
                raise InvalidPlan(
                    f"stage {s}: in_flight={stage.in_flight} must be {(delay + 1) * stage.microbatch_size}: its gradients are late "
                    f"by {delay} micro-batches, and one is in hand. Fix: set it, or plan with strategy/planner=layerpipe"
                )

    def check_pipeline(self, s: int, *, trains: bool) -> None:
        if not trains:
            raise InvalidPlan(
                f"stage {s}: devices {list(self.beside)} help with its backward, and mode=inference has none. Fix: leave "
                "weight_device and input_share out of the plan"
            )
        raise InvalidPlan(
            f"stage {s}: {self.written} has half of a backward a period later, and a pipeline that drains before every update "
            "would wait for it. Fix: strategy/schedule=no_flush strategy/weights=stash, or a plan without helpers"
        )


Value = Helpers

NOBODY = Helpers()


def helpers_of(stage: Stage) -> Helpers:
    """Who helps a stage."""
    return stage[Helpers] or NOBODY


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
    """The periods of stages with helpers: forwards as late as those behind them allow, backwards as soon as they can."""
    device = [stage.devices[0] for stage in stages]
    forward = [0] * len(stages)
    for s, t in sorted(edges):
        forward[t] = max(forward[t], forward[s] + (device[s] != device[t]))
    inputs, sinks = list(forward), {*range(len(stages))} - {s for s, _ in edges}
    late = [forward[s] if s in sinks else max(forward) for s in range(len(stages))]
    for s, t in sorted(edges, reverse=True):
        apart = device[s] != device[t]
        helped = (1 + (helper != device[s]) for helper, _ in helpers_of(stages[t]).input_share)
        late[s], inputs[s] = min(late[s], late[t] - apart), max(inputs[s], inputs[t] + max(apart, *helped, 0))
    return tuple(Ticks(late[s], inputs[s], inputs[s] + bool(stage.adding)) for s, stage in enumerate(stages))


def delays(stages: Sequence[Stage], edges: Edges) -> tuple[int, ...]:
    """Micro-batches by which the gradients of each stage are late, in a plan with helpers."""
    return tuple(tick.weight - tick.forward for tick in ticks(stages, edges))


def parts_of_inputs(stage: Stage) -> tuple[tuple[int, float], ...]:
    """Who makes which part of the gradients of a stage's inputs: (device, share), its own device first."""
    value = helpers_of(stage)
    return (stage.devices[0], value.own_input_share), *value.input_share


def columns(stage: Stage, count: int) -> tuple[tuple[int, int, int], ...]:
    """Who makes which of a stage's input gradients: (device, columns [lo, hi) of the weight), of `count` columns, its own first.

    Shares are rounded to columns, so a device may have none.
    """
    out, at, whole = list[tuple[int, int, int]](), 0, 0.0
    for device, share in parts_of_inputs(stage):
        whole += share
        out.append((device, at, at := round(min(whole, 1.0) * count)))
    return tuple(out)


def _faults(stage: Stage, microbatch_size: int, num_devices: int) -> Iterator[tuple[str, object, str, str]]:
    """The faults of a stage of a plan with helpers: field, value, rule, fix."""
    helpers, keep = helpers_of(stage), "leave it out (strategy/memory=keep)"
    shares = [list(pair) for pair in helpers.input_share]
    if helpers is not NOBODY and not helpers.beside:
        yield "helpers", "{}", "names no device", "leave it out, or name one"
    for field, value, devices in (
        ("weight_device", helpers.weight_device, list(helpers.adding)),
        ("input_share", shares, [device for device, _ in helpers.input_share]),
    ):
        if any(device in stage.devices for device in devices):
            yield field, value, f"names a device of the stage itself, {list(stage.devices)}", "leave it out, or name another device"
        if any(not 0 <= device < num_devices for device in devices):
            yield field, value, f"must name devices out of 0..{num_devices - 1}", "name one of these, or use more devices"
        if len(set(devices)) < len(devices):
            yield field, value, "names a device twice", "give one share a device"
    total = sum(share for _, share in helpers.input_share)
    if any(share <= 0.0 for _, share in helpers.input_share) or total > 1.0 + ROUNDING:
        yield "input_share", shares, f"has shares above 0 that add up to 1 at most, not {total:g}", "give each helper its part of 1"
    if stage.microbatch_size != microbatch_size:
        rule = f"is not {microbatch_size}, as of stage 0: in a plan with helpers a period is one micro-batch of every stage"
        yield "microbatch_size", stage.microbatch_size, rule, "give all stages one micro-batch size"
    marks = marks_of(stage)
    for field, value, fits, fix in (
        ("devices", list(stage.devices), len(stage.devices) == 1, "one device a stage"),
        ("k", stage.k, stage.k == 1, "k=1"),
        ("recompute", list(marks.recompute[:8]), not marks.recompute, keep),
        ("offload", list(marks.offload[:8]), not marks.offload, keep),
    ):
        if not fits:
            yield field, value, "has no place in a plan with helpers: each stage has one device, k=1, and keeps what it makes", fix
