"""The second halves of a stage's backwards, from the gradients of its inputs to those of its weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, final

from torch import Tensor

from gpp.capture.late import Late, LateGradients
from gpp.capture.stage import StageModule
from gpp.program.kinds import BACKWARD
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
        formulas, elsewhere = moves or stage.spares, bool(stage.adding)
        found = modules[s].split(whole=slow_nodes(job, s), formulas=formulas, elsewhere=elsewhere)
        blocks = [name for name in found.whole if job.captured.node_of[name].kind == "block"]
        if blocks:
            notes.append(
                f"stage {s}: {', '.join(blocks[:5])} {'is' if len(blocks) == 1 else 'are'} hand-written, so all gradients of "
                f"{'it' if len(blocks) == 1 else 'them'} are made in the first half of a backward"
            )
    return tuple(notes)


def slow_nodes(job: Job, s: int) -> frozenset[str]:
    """Nodes of a stage whose backwards stay whole, because the halves of them take too long."""
    return frozenset(node for op in set(job.plan.stages[s].ops) & set(job.settings.whole_ops) for node in job.graph.ops[op].nodes)


@final
class LateHalves:
    """The tensors that the micro-batches of one stage hold between the halves.

    Operators that stay whole give the gradients of their weights in the first half. Where the pipeline drains, these meet the sums
    at once. Where it does not, that may be before the update of the mini-batch before, so they wait like all others.

    Args:
        late: of the stage's module.
        weights: decides which weights a pass uses; None where there is one version.
    """

    def __init__(self, late: Late, weights: AbstractStageWeights | None) -> None:
        self._late, self._weights = late, weights
        self._kept: dict[int, LateGradients] = {}

    def sent(self, microbatch: int, made: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
        """The tensors that go to others after the first half of `microbatch`, by direction and name.

        Args:
            made: the gradients of the stage's inputs.
        """
        return self._late.between(self._kept[microbatch], made) if self._late.between else {BACKWARD: made}

    def keep(self, microbatch: int, number: int) -> None:
        """Keep what the first half of `microbatch` has left, number `number` of those that this device counts for its weights."""
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
