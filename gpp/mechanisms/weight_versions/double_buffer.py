"""Double-buffered weights (PipeDream-2BW, ICML '21): mini-batch t uses version t - 1 at every stage, in both passes.

An update comes after m >= D micro-batches, so no micro-batch in flight needs a version older than the last but one: two copies,
and a delay of one update everywhere, W(t+1) = W(t) - lr * grad f(W(t-1)).
"""

from __future__ import annotations

from typing import ClassVar, final

from gpp.mechanisms.weight_versions.base import AbstractVersionPolicy
from gpp.settings import settings
from gpp.weights.base import PipelinePosition


@final
@settings("strategy.weights")
class DoubleBuffer(AbstractVersionPolicy):
    """Two versions, exchanged at every update."""

    in_step: ClassVar[bool] = True

    def forward_version(self, position: PipelinePosition, microbatch: int, start: int = 0) -> int:
        return max(start, position.batch(microbatch) - 1)

    def least_accumulation(self, depth: int) -> int:
        return depth
