"""A helper: gradients of the weights of a stage that another device has (`gpp.plan.helpers`).

It holds no weights. What a micro-batch's gradients are made of comes in one message (`gpp.capture.operands`); they are added up in
memory that the sum with the stage's own device returns, and that the next mini-batch finds empty.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import final

import torch
from torch import nn

from gpp.capture.codec import dtype_of
from gpp.capture.cut import TensorSpec
from gpp.capture.late import LateGradients
from gpp.capture.operands import Operands
from gpp.program.kinds import HELPING
from gpp.runtime.job import Job
from gpp.runtime.transport.channels import AbstractTransport, Mark
from gpp.runtime.worker.halves import operands_of_stage
from gpp.runtime.worker.mailbox import Mailbox
from gpp.runtime.worker.messages import Boundary, Layout
from gpp.runtime.worker.stage import Span


@final
class Helper:
    """Makes the second halves of one stage's backwards.

    Args:
        operands: of the stage's operators, in the order of the forward.
        params: all trained parameters of the stage by full name, of which only form and gradient are used.
        mailbox: gives what the stage's own device has sent.
        now: gives the marks at which a pass begins and ends.
    """

    def __init__(
        self,
        operands: Sequence[Operands],
        params: Mapping[str, nn.Parameter],
        mailbox: Mailbox,
        now: Callable[[], Mark],
    ) -> None:
        self._operands, self.params, self.mailbox, self._now = operands, params, mailbox, now

    def weight_gradients(self, microbatch: int) -> Span:
        """Add to the gradients what a micro-batch gives."""
        tensors = iter(self.mailbox.take(HELPING, microbatch))
        given = [[next(tensors)[1].view(shape) for shape, _ in each.forms] for each in self._operands]
        start, late = self._now(), LateGradients()
        # As a backward comes by: the last operator of the forward first.
        for each, own in reversed(list(zip(self._operands, given, strict=True))):
            params = [self.params[name] for name in each.params]
            late.add(params, lambda make=each.make, own=own, params=params: make(own, params), fresh=True)
        late.deliver()
        return start, self._now()


def operand_layout(operands: Sequence[Operands], samples: int) -> Layout:
    """The message of a micro-batch to a helper: every tensor by samples."""
    names, specs = [], []
    for each in operands:
        for number, (shape, dtype) in enumerate(each.forms):
            names.append(f"{each.node}:{number}")
            size = torch.Size(shape).numel() // samples
            specs.append(TensorSpec(shape=(size,), batch_dim=0, dtype=dtype, differentiable=False))
    return Layout(tuple(names), tuple(specs))


def build_helpers(
    job: Job, device_id: int, device: torch.device, transport: AbstractTransport, now: Callable[[], Mark]
) -> dict[int, Helper]:
    """What a device does for stages of others."""
    out = {}
    for s, stage in enumerate(job.plan.stages):
        if stage.weight_device == device_id:
            operands = operands_of_stage(job, s)
            lays = {s: operand_layout(operands, stage.microbatch_size)}
            boundary = Boundary(incoming={}, outgoing={}, returning_in={}, returning_out={}, helping_in=lays)
            mailbox = Mailbox(
                stage=s, device_id=device_id, transport=transport, device=device, boundary=boundary, handover={}, sends=()
            )
            out[s] = Helper(operands, _placeholders(job, s, device), mailbox, now)
    return out


def _placeholders(job: Job, s: int, device: torch.device) -> dict[str, nn.Parameter]:
    """Parameters of the forms of a stage's, all elements of each in one place."""
    trained, out = {name for op in job.plan.stages[s].ops for name in job.graph.trained_by[op]}, {}
    for node in job.captured.nodes:
        if node.kind == "param" and node.target in trained:
            one = torch.zeros((), dtype=dtype_of(node.dtype or "float32"), device=device)
            out[node.target] = nn.Parameter(one.expand([int(size) for size in node.shape or ()]))
    return out
