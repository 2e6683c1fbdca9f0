"""The tensors that a stage's own device gives its helpers of every micro-batch, between the halves of its backward."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gpp.mechanisms.helpers.kinds import HELPING, HELPING_INPUTS
from gpp.mechanisms.helpers.operands import Head, Operands, head_of_stage, operands_of_stage
from gpp.mechanisms.helpers.stage import columns, helpers_of
from gpp.mechanisms.split_backward.late import LateGradients
from gpp.program.kinds import BACKWARD, Direction
from gpp.runtime.job import Job


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
        head = head_of_stage(job, s) if helpers_of(stage).input_share else None
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
