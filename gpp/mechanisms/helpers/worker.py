"""A helper: parts of the backward of a stage that another device has.

It holds no weights. What it makes of a micro-batch is made of what comes in one message (`Given` below): for gradients of
weights what each operator leaves, for gradients of inputs the gradient of the output and the columns of the weight that the
forward has used. Gradients of weights are added up in memory that the sum with the stage's own device returns, and that the next
mini-batch finds empty.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor, nn

from gpp.capture.codec import dtype_of
from gpp.capture.cut import BoundaryTensor
from gpp.mechanisms.helpers.kinds import HELPED_INPUTS, HELPED_WEIGHTS, HELPING, HELPING_INPUTS
from gpp.mechanisms.helpers.operands import Form, Head, Operands, head_of_stage, operands_of_stage
from gpp.mechanisms.helpers.stage import columns, helpers_of
from gpp.mechanisms.split_backward.late import LateGradients, in_columns
from gpp.mechanisms.split_backward.operators import late_of
from gpp.program.kinds import BACKWARD, Direction
from gpp.runtime.engine import task_of
from gpp.runtime.job import Job
from gpp.runtime.transport.channels import Mark
from gpp.runtime.worker.hooks import AbstractWorkerPart, Hooks, OwnAction, OwnDevice
from gpp.runtime.worker.mailbox import Mailbox
from gpp.runtime.worker.messages import Boundary, Layout
from gpp.runtime.worker.stage import Span, StageRunner
from gpp.stage import Stage


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """The operands of the helpers' parts.

    Operators that stay whole, whose gradients come in the first half, are not among it.

    Args:
        operands: what the gradients of the weights are made of; None where no helper makes them.
        head: of the stage whose input gradients are divided; None where they are not.
        columns: of those, by the device that makes them, the own device's first.
    """

    operands: tuple[Operands, ...] | None
    head: Head | None
    columns: tuple[tuple[int, int, int], ...] = ()

    @classmethod
    def of(cls, job: Job, s: int) -> Given:
        """For a stage with helpers."""
        stage = job.plan.stages[s]
        operands = operands_of_stage(job, s) if stage.adding else None
        head = head_of_stage(job.plan, s, task_of(job)) if helpers_of(stage).input_share else None
        return cls(operands=operands, head=head, columns=columns(stage, head.columns) if head else ())

    def between(self, kept: LateGradients, made: dict[str, Tensor]) -> dict[Direction, dict[str, Tensor]]:
        """The tensors that go to helpers, and to the stages before, by direction and name.

        Args:
            kept: what the first half has left; what a helper is given leaves it.
            made: the gradients of the stage's inputs, of which the own device returns its columns.
        """
        out: dict[Direction, dict[str, Tensor]] = {BACKWARD: made}
        if self.operands is not None:
            given, ours = kept.hand_over(), out.setdefault(HELPING, {})
            for each in self.operands:
                # An operator without a gradient of its output gives none of its weights'.
                found = given.get(each.node) or tuple(torch.zeros(shape, dtype=dtype) for shape, dtype in each.forms)
                ours |= {f"{each.node}:{i}": tensor for i, tensor in enumerate(found)}
        if self.head:
            assert kept.divided, "the backward has not come by the operator whose product is divided"
            (gradient, weight), kept.divided = kept.divided, None
            parts = {f"weight:{lo}": weight[:, lo:hi] for _, lo, hi in self.columns[1:]}
            out[HELPING_INPUTS] = {"gradient": gradient, **parts}
            _, lo, hi = self.columns[0]
            out[BACKWARD] = {name: tensor[..., lo:hi] for name, tensor in made.items()} if hi > lo else {}
        return out


NOTHING = Layout((), ())
"""Of a message that is never sent."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Helper:
    """Makes parts of one stage's backwards.

    Args:
        given: what it is sent.
        made: form of the part of a micro-batch's input gradients that it makes; None where it makes none.
        samples: of a micro-batch.
        params: the trained parameters whose gradients it makes, by full name, of which only form and gradient are used.
        mailbox: gives what the stage's own device has sent, and takes what goes to the stages before.
        now: gives the marks at which a pass begins and ends.
    """

    given: Given
    made: tuple[int, ...] | None
    samples: int
    params: Mapping[str, nn.Parameter]
    mailbox: Mailbox
    now: Callable[[], Mark]

    def weight_gradients(self, microbatch: int) -> Span:
        """Add to the gradients of the weights what a micro-batch gives."""
        tensors = iter(self.mailbox.take(HELPING, microbatch))
        found = [(each, [next(tensors)[1] for _ in each.forms]) for each in self.given.operands or ()]
        start, late = self.now(), LateGradients()
        # As a backward comes by: the last operator of the forward first.
        for each, own in reversed(found):
            params = [self.params[name] for name in each.params]
            late.add(params, lambda make=each.make, own=own, params=params: make(own, params), fresh=True)
        late.deliver()
        return start, self.now()

    def input_gradients(self, microbatch: int) -> Span:
        """Make columns of a micro-batch's input gradients, for the stages before."""
        assert self.given.head is not None and self.made is not None
        (_, gradient), (_, weight) = self.mailbox.take(HELPING_INPUTS, microbatch)
        start = self.now()
        part = in_columns(gradient, weight).view(self.made)
        end = self.now()
        self.mailbox.put(BACKWARD, microbatch, microbatch * self.samples, {self.given.head.data: part})
        return start, end


class HelperHooks(Hooks):
    """A device's work for stages of others, and its messages to those that help its own.

    Args:
        own: the device.
    """

    def __init__(self, own: OwnDevice) -> None:
        self._job, self.helpers = own.job, _helpers(own)
        self._given = {s: Given.of(own.job, s) for s in own.modules if own.job.plan.stages[s].beside}

    def attach(self, runners: Mapping[int, StageRunner]) -> None:
        for s, given in self._given.items():
            late = late_of(runners[s].module)
            late.between = given.between
            if given.head:
                _, lo, hi = given.columns[0]
                late.own_columns[given.head.node] = lo, hi

    def boundary(self, stage: int, found: Boundary) -> Boundary:
        plan, out = self._job.plan, found
        for t in plan.successors[stage]:
            if helpers_of(plan.stages[t]).input_share:
                came = by_columns(plan.stages[t], out.returning_in[t])
                out = replace(out, parts=out.parts | {(BACKWARD, t, device): part for device, part in came.items()})
        own = plan.stages[stage]
        if helpers_of(own).input_share:
            returning = {p: by_columns(own, whole).get(own.devices[0], NOTHING) for p, whole in out.returning_out.items()}
            out = replace(out, returning_out=returning)
        if stage not in self._given:
            return out
        operands, parts = _layouts(self._given[stage], self._job, stage)
        added = {**out.added, HELPING: {stage: operands}, HELPING_INPUTS: {stage: NOTHING}}
        return replace(out, added=added, parts=out.parts | {(HELPING_INPUTS, stage, device): lay for device, lay in parts.items()})

    def mailboxes_of_others(self) -> Mapping[int, Mailbox]:
        return {s: helper.mailbox for s, helper in self.helpers.items()}

    def params_of_others(self) -> Mapping[int, Mapping[str, nn.Parameter]]:
        return {s: helper.params for s, helper in self.helpers.items()}

    def runs(self) -> Mapping[str, OwnAction]:
        return {
            HELPED_WEIGHTS: lambda stage, microbatch: self.helpers[stage].weight_gradients(microbatch),
            HELPED_INPUTS: lambda stage, microbatch: self.helpers[stage].input_gradients(microbatch),
        }


class HelperWorkerPart(AbstractWorkerPart):
    """Helpers on a device, and devices that are helped."""

    def build(self, own: OwnDevice) -> HelperHooks:
        return HelperHooks(own)


def by_columns(stage: Stage, whole: Layout) -> dict[int, Layout]:
    """Device -> the message of the columns that it makes of a stage's input gradients, in the order of the columns.

    Args:
        whole: the message of all of them.
    """
    (spec,) = whole.specs
    *rest, count = spec.shape
    return {
        device: Layout(whole.names, (replace(spec, shape=(*rest, hi - lo)),)) for device, lo, hi in columns(stage, count) if hi > lo
    }


def _layouts(given: Given, job: Job, s: int) -> tuple[Layout, dict[int, Layout]]:
    """The messages to a stage's helpers: of what gradients of weights are made of, and by device of those of inputs."""
    forms = {f"{each.node}:{i}": form for each in given.operands or () for i, form in enumerate(each.forms)}
    parts = dict[int, Layout]()
    if given.head:
        gradient, _ = given.head.forms(job.captured.node_of, job.plan.stages[s].microbatch_size)
        for device, lo, hi in given.columns[1:]:
            weight = (gradient[0][1], hi - lo), gradient[1]
            parts[device] = _layout({"gradient": gradient, f"weight:{lo}": weight})
    return _layout(forms), parts


def _layout(forms: Mapping[str, Form]) -> Layout:
    specs = (BoundaryTensor(shape=shape, batch_dim=0, dtype=dtype, differentiable=False) for shape, dtype in forms.values())
    return Layout(tuple(forms), tuple(specs), whole=True)


def _helpers(own: OwnDevice) -> dict[int, Helper]:
    """The device's helpers of other devices' stages."""
    job, out = own.job, dict[int, Helper]()
    for s, stage in enumerate(job.plan.stages):
        if own.device_id not in stage.beside:
            continue
        given = Given.of(job, s)
        operands, parts = _layouts(given, job, s)
        added = {HELPING: {s: operands}, HELPING_INPUTS: {s: parts.get(own.device_id, NOTHING)}}
        boundary, made = Boundary(incoming={}, outgoing={}, returning_in={}, returning_out={}, added=added), None
        if given.head and own.device_id in parts:
            _, (shape, dtype) = given.head.forms(job.captured.node_of, stage.microbatch_size)
            whole = Layout((given.head.data,), (BoundaryTensor(shape=shape[1:], batch_dim=0, dtype=dtype, differentiable=True),))
            part = by_columns(stage, whole)[own.device_id]
            made = (shape[0], *part.specs[0].shape)
            boundary.returning_out.update(dict.fromkeys(job.plan.predecessors[s], part))
        mailbox = Mailbox(
            stage=s,
            device_id=own.device_id,
            transport=own.transport,
            device=own.device,
            boundary=boundary,
            handover=own.handover,
            sends=(BACKWARD,),
        )
        params = _placeholders(job, s, own.device) if own.device_id in stage.adding else {}
        out[s] = Helper(given=given, made=made, samples=stage.microbatch_size, params=params, mailbox=mailbox, now=own.clock.now)
    return out


def _placeholders(job: Job, s: int, device: torch.device) -> dict[str, nn.Parameter]:
    """Parameters of the forms of a stage's, all elements of each in one place."""
    trained, out = {name for op in job.plan.stages[s].ops for name in job.graph.trained_by[op]}, {}
    for node in job.captured.nodes:
        if node.kind == "param" and node.target in trained:
            one = torch.zeros((), dtype=dtype_of(node.dtype or "float32"), device=device)
            out[node.target] = nn.Parameter(one.expand([int(size) for size in node.shape or ()]))
    return out


WORKER = HelperWorkerPart()
