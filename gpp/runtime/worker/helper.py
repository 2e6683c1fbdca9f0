"""A helper: parts of the backward of a stage that another device has (`gpp.plan.helpers`).

It holds no weights. What it makes of a micro-batch is made of what comes in one message (`gpp.capture.operands`): for gradients of
weights what each operator leaves, for gradients of inputs the gradient of the output and the columns of the weight that the
forward has used. Gradients of weights are added up in memory that the sum with the stage's own device returns, and that the next
mini-batch finds empty.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import final

import torch
from torch import nn

from gpp.capture.codec import dtype_of
from gpp.capture.cut import TensorSpec
from gpp.capture.late import LateGradients, in_columns
from gpp.capture.operands import Form
from gpp.program.kinds import BACKWARD, HELPING, HELPING_INPUTS
from gpp.runtime.job import Job
from gpp.runtime.transport.channels import AbstractTransport, Mark
from gpp.runtime.worker.halves import Given
from gpp.runtime.worker.mailbox import Handover, Mailbox
from gpp.runtime.worker.messages import Boundary, Layout, by_columns
from gpp.runtime.worker.stage import Span


@final
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

    def __init__(
        self,
        given: Given,
        made: tuple[int, ...] | None,
        samples: int,
        params: Mapping[str, nn.Parameter],
        mailbox: Mailbox,
        now: Callable[[], Mark],
    ) -> None:
        self._given, self._made, self._samples = given, made, samples
        self.params, self.mailbox, self._now = params, mailbox, now

    def weight_gradients(self, microbatch: int) -> Span:
        """Add to the gradients of the weights what a micro-batch gives."""
        tensors = iter(self.mailbox.take(HELPING, microbatch))
        found = [(each, [next(tensors)[1] for _ in each.forms]) for each in self._given.operands or ()]
        start, late = self._now(), LateGradients()
        # As a backward comes by: the last operator of the forward first.
        for each, own in reversed(found):
            params = [self.params[name] for name in each.params]
            late.add(params, lambda make=each.make, own=own, params=params: make(own, params), fresh=True)
        late.deliver()
        return start, self._now()

    def input_gradients(self, microbatch: int) -> Span:
        """Make columns of a micro-batch's input gradients, for the stages before."""
        assert self._given.head is not None and self._made is not None
        (_, gradient), (_, weight) = self.mailbox.take(HELPING_INPUTS, microbatch)
        start = self._now()
        part = in_columns(gradient, weight).view(self._made)
        end = self._now()
        self.mailbox.put(BACKWARD, microbatch, microbatch * self._samples, {self._given.head.data: part})
        return start, end


def with_helpers(found: Boundary, given: Given | None, job: Job, s: int) -> Boundary:
    """The boundary of a stage, with what its helpers are sent."""
    if given is None:
        return found
    operands, parts = _layouts(given, job, s)
    helping = {HELPING: {s: operands}, HELPING_INPUTS: {s: Layout((), ())}}
    return replace(found, helping=helping, parts=found.parts | {(HELPING_INPUTS, s, device): lay for device, lay in parts.items()})


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
    specs = (TensorSpec(shape=shape, batch_dim=0, dtype=dtype, differentiable=False) for shape, dtype in forms.values())
    return Layout(tuple(forms), tuple(specs), whole=True)


def build_helpers(
    job: Job, device_id: int, device: torch.device, transport: AbstractTransport, now: Callable[[], Mark], handover: Handover
) -> dict[int, Helper]:
    """What a device does for stages of others.

    Args:
        handover: of the device.
    """
    out = {}
    for s, stage in enumerate(job.plan.stages):
        if device_id not in stage.helpers:
            continue
        given = Given.of(job, s)
        operands, parts = _layouts(given, job, s)
        helping = {HELPING: {s: operands}, HELPING_INPUTS: {s: parts.get(device_id, Layout((), ()))}}
        boundary, made = Boundary(incoming={}, outgoing={}, returning_in={}, returning_out={}, helping=helping), None
        if given.head and device_id in parts:
            _, (shape, dtype) = given.head.forms(job.captured.node_of, stage.microbatch_size)
            whole = Layout((given.head.data,), (TensorSpec(shape=shape[1:], batch_dim=0, dtype=dtype, differentiable=True),))
            own = by_columns(stage, whole)[device_id]
            made = (shape[0], *own.specs[0].shape)
            boundary.returning_out.update(dict.fromkeys(job.plan.predecessors[s], own))
        mailbox = Mailbox(
            stage=s,
            device_id=device_id,
            transport=transport,
            device=device,
            boundary=boundary,
            handover=handover,
            sends=(BACKWARD,),
        )
        params = _placeholders(job, s, device) if stage.weight_device == device_id else {}
        out[s] = Helper(given, made, stage.microbatch_size, params, mailbox, now)
    return out


def _placeholders(job: Job, s: int, device: torch.device) -> dict[str, nn.Parameter]:
    """Parameters of the forms of a stage's, all elements of each in one place."""
    trained, out = {name for op in job.plan.stages[s].ops for name in job.graph.trained_by[op]}, {}
    for node in job.captured.nodes:
        if node.kind == "param" and node.target in trained:
            one = torch.zeros((), dtype=dtype_of(node.dtype or "float32"), device=device)
            out[node.target] = nn.Parameter(one.expand([int(size) for size in node.shape or ()]))
    return out
