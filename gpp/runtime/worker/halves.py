"""The second halves of a stage's backwards, from the gradients of its inputs to those of its weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

import torch
from torch import Tensor

from gpp.capture.late import Late, LateGradients
from gpp.capture.operands import Head, Operands, head_of, operands_of
from gpp.capture.stage import StageModule, halves_of
from gpp.errors import UnsupportedPlan
from gpp.plan.helpers import columns
from gpp.program.kinds import HELPING, HELPING_INPUTS, Direction
from gpp.runtime.halves import split_stages
from gpp.runtime.job import Job, restore

if TYPE_CHECKING:
    from gpp.runtime.worker.weights.base import AbstractStageWeights


def split_modules(job: Job, modules: Mapping[int, StageModule]) -> tuple[str, ...]:
    """Split the backwards of the stages for which the job's program has halves.

    Operators with graphs of their own stay whole where the memory policy or the weight policy has hooks on what autograd saves: the
    second half would find other weights than the first, or hold what was to be let go of.

    Returns:
        What a user is to be told: blocks that stay whole.
    """
    notes = []
    moves = bool(job.settings.weights) and restore(job.settings.weights).backward != "same"
    for s in set(split_stages(job)) & set(modules):
        stage = job.plan.stages[s]
        formulas, elsewhere = moves or bool(stage.recompute or stage.offload), stage.weight_device is not None
        found = modules[s].split(whole=_slow(job, s), formulas=formulas, elsewhere=elsewhere)
        blocks = [name for name in found.whole if job.captured.node_of[name].kind == "block"]
        if blocks:
            notes.append(
                f"stage {s}: {', '.join(blocks[:5])} {'is' if len(blocks) == 1 else 'are'} hand-written, so all gradients of "
                f"{'it' if len(blocks) == 1 else 'them'} are made in the first half of a backward"
            )
    return tuple(notes)


def _slow(job: Job, s: int) -> frozenset[str]:
    """Nodes of a stage whose halves take too long."""
    return frozenset(node for op in set(job.plan.stages[s].ops) & set(job.settings.whole_ops) for node in job.graph.ops[op].nodes)


def operands_of_stage(job: Job, s: int) -> tuple[Operands, ...]:
    """What a stage's own device sends its helper of a micro-batch, as both of them know it."""
    nodes = [node for op in job.plan.stages[s].ops for node in job.graph.ops[op].nodes]
    split = halves_of(job.captured, nodes, whole=_slow(job, s))
    return operands_of(list(split), job.captured.node_of, job.plan.stages[s].microbatch_size)


def head_of_stage(job: Job, s: int) -> Head:
    """The operator of a stage whose product several devices make, by columns.

    Raises:
        UnsupportedPlan: there is none.
    """
    nodes = [node for op in job.plan.stages[s].ops for node in job.graph.ops[op].nodes]
    found = head_of(job.captured, nodes, whole=_slow(job, s))
    if isinstance(found, str):
        raise UnsupportedPlan(f"stage {s}: its input gradients cannot be divided: {found}")
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """What a stage's own device gives its helpers of every micro-batch.

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
        operands = operands_of_stage(job, s) if stage.weight_device is not None else None
        head = head_of_stage(job, s) if stage.input_share else None
        return cls(operands=operands, head=head, columns=columns(stage, head.columns) if head else ())


@final
class LateHalves:
    """What the micro-batches of one stage hold between the halves.

    Operators that stay whole give the gradients of their weights in the first half. Where the pipeline drains, these meet the sums
    at once. Where it does not, that may be before the update of the mini-batch before, so they wait like all others.

    Args:
        late: of the stage's module.
        weights: decides which weights a pass uses; None where there is one version.
        given: what its helpers are given; None where nobody helps. Operators that stay whole, whose gradients come in the first
            half, are not among it.
    """

    def __init__(self, late: Late, weights: AbstractStageWeights | None, given: Given | None = None) -> None:
        self._late, self._weights, self._given = late, weights, given
        self._kept: dict[int, LateGradients] = {}
        if given and given.head:
            _, lo, hi = given.columns[0]
            late.own_columns[given.head.node] = lo, hi

    def hand_over(self, microbatch: int) -> dict[Direction, dict[str, Tensor]]:
        """What helpers make their parts of `microbatch` of, after its first half: by direction, tensors by name."""
        out: dict[Direction, dict[str, Tensor]] = {}
        if self._given is None:
            return out
        kept = self._kept[microbatch]
        if self._given.operands is not None:
            given, ours = kept.hand_over(), out.setdefault(HELPING, {})
            for each in self._given.operands:
                # An operator without a gradient of its output gives none of its weights'.
                found = given.get(each.node) or tuple(torch.zeros(shape, dtype=dtype) for shape, dtype in each.forms)
                ours |= {f"{each.node}:{i}": tensor for i, tensor in enumerate(found)}
        if self._given.head:
            assert kept.divided, "the backward has not come by the operator whose product is divided"
            (gradient, weight), kept.divided = kept.divided, None
            parts = {f"weight:{lo}": weight[:, lo:hi] for _, lo, hi in self._given.columns[1:]}
            out[HELPING_INPUTS] = {"gradient": gradient, **parts}
        return out

    def own_part(self, made: dict[str, Tensor]) -> dict[str, Tensor]:
        """Of the gradients of a stage's inputs, what its own device sends back: all, or its columns."""
        if self._given is None or self._given.head is None:
            return made
        _, lo, hi = self._given.columns[0]
        return {name: tensor[..., lo:hi] for name, tensor in made.items()} if hi > lo else {}

    def keep(self, microbatch: int, number: int) -> None:
        """After the first half of `microbatch`, which is number `number` of those that this device counts for its weights."""
        kept = self._kept[microbatch] = self._late.take()
        if self._weights:
            for leaf in self._weights.leaves(number):
                if (gradient := leaf.grad) is not None:
                    kept.add([leaf], lambda found=gradient: [found], fresh=True)
                    leaf.grad = None

    def finish(self, microbatch: int, number: int) -> None:
        """The second half: add to the gradients."""
        kept = self._kept.pop(microbatch)
        if self._weights:
            self._weights.late(number)
        kept.deliver()
        if self._weights:
            self._weights.done(number)
