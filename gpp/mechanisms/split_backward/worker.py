"""Split backwards on a worker: how I and W are run, and what is kept between them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

from torch import Tensor

from gpp.mechanisms.split_backward.job import split_stages
from gpp.mechanisms.split_backward.kinds import INPUT_GRADIENTS, WEIGHT_GRADIENTS
from gpp.mechanisms.split_backward.late import Late, LateGradients
from gpp.mechanisms.split_backward.operators import late_of, split
from gpp.program.kinds import BACKWARD
from gpp.runtime.job import Job, restore
from gpp.runtime.worker.around import AbstractRest, AbstractStageWeights
from gpp.runtime.worker.hooks import AbstractWorkerPart, Hooks, OwnAction, OwnDevice
from gpp.runtime.worker.stage import StageRunner


class SplitHooks(Hooks):
    """The stages of a device whose backwards are split.

    Operators with graphs of their own stay whole where the memory policy or the weight policy has hooks on what autograd saves: the
    second half would find other weights than the first, or hold what was to be let go of.
    """

    def __init__(self, own: OwnDevice) -> None:
        job, notes = own.job, list[str]()
        self._split = set(split_stages(job)) & set(own.modules)
        moves = bool(job.settings.weights) and not restore(job.settings.weights).same
        for s in self._split:
            stage = job.plan.stages[s]
            formulas, elsewhere = moves or stage.spares, bool(stage.adding)
            found = split(own.modules[s], whole=slow_nodes(job, s), formulas=formulas, elsewhere=elsewhere)
            blocks = [name for name in found.whole if job.captured.node_of[name].kind == "block"]
            if blocks:
                notes.append(
                    f"stage {s}: {', '.join(blocks[:5])} {'is' if len(blocks) == 1 else 'are'} hand-written, so all gradients of "
                    f"{'it' if len(blocks) == 1 else 'them'} are made in the first half of a backward"
                )
        self.notes = tuple(notes)

    def attach(self, runners: Mapping[int, StageRunner]) -> None:
        self._runners = runners
        self._rests = {s: LateHalves(late_of(runners[s].module), runners[s].weights) for s in self._split}

    def runs(self) -> Mapping[str, OwnAction]:
        return {
            INPUT_GRADIENTS: lambda stage, microbatch: self._runners[stage].backward(microbatch, self._rests[stage]),
            WEIGHT_GRADIENTS: lambda stage, microbatch: self._runners[stage].finish(microbatch, self._rests[stage]),
        }


class SplitWorkerPart(AbstractWorkerPart):
    """Split backwards on a device."""

    def build(self, own: OwnDevice) -> SplitHooks:
        return SplitHooks(own)


WORKER = SplitWorkerPart()


def slow_nodes(job: Job, s: int) -> frozenset[str]:
    """Nodes of a stage whose backwards stay whole, because the halves of them take too long."""
    return frozenset(job.graph.nodes_of({*job.plan.stages[s].ops} & {*job.settings.whole_ops}))


@final
class LateHalves(AbstractRest):
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
        return self._late.between(self._kept[microbatch], made) if self._late.between else {BACKWARD: made}

    def keep(self, microbatch: int, number: int) -> None:
        kept = self._kept[microbatch] = self._late.take()
        if self._weights:
            for leaf in self._weights.leaves(number):
                if (gradient := leaf.grad) is not None:
                    kept.add([leaf], lambda found=gradient: [found], fresh=True)
                    leaf.grad = None

    def finish(self, microbatch: int, number: int) -> None:
        self._kept.pop(microbatch).deliver()
