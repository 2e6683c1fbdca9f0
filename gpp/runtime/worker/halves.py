"""The second halves of a stage's backwards, from the gradients of its inputs to those of its weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, final

import torch
from torch import Tensor

from gpp.capture.late import Late, LateGradients
from gpp.capture.operands import Operands, operands_of
from gpp.capture.stage import StageModule, halves_of
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


@final
class LateHalves:
    """What the micro-batches of one stage hold between the halves.

    Operators that stay whole give the gradients of their weights in the first half. Where the pipeline drains, these meet the sums
    at once. Where it does not, that may be before the update of the mini-batch before, so they wait like all others.

    Args:
        late: of the stage's module.
        weights: decides which weights a pass uses; None where there is one version.
        operands: what another device makes gradients of; None where nobody helps. Operators that stay whole, whose gradients come in
            the first half, are not among them.
    """

    def __init__(self, late: Late, weights: AbstractStageWeights | None, operands: Sequence[Operands] | None = None) -> None:
        self._late, self._weights, self._operands = late, weights, operands
        self._kept: dict[int, LateGradients] = {}

    @property
    def helped(self) -> bool:
        """Whether another device makes second halves."""
        return self._operands is not None

    def hand_over(self, microbatch: int, samples: int) -> dict[str, Tensor]:
        """What the second half of `microbatch` is made of, for its helper: tensors by name, each by samples, [samples, *]."""
        given, out = self._kept[microbatch].hand_over(), dict[str, Tensor]()
        for each in self._operands or ():
            # An operator without a gradient of its output gives none of its weights'.
            found = given.get(each.node) or tuple(torch.zeros(shape, dtype=dtype) for shape, dtype in each.forms)
            out |= {f"{each.node}:{i}": tensor.reshape(samples, -1) for i, tensor in enumerate(found)}
        return out

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
