"""A weight policy of your own, in one file: every stage is late by the same number of updates.

W(t+1) = W(t) - lr * grad f(W(t - delay)), whatever the depth. `double_buffer` has a delay of one, for which a mini-batch must have
as many micro-batches as the pipeline has stages; with a longer delay fewer will do.
"""

from __future__ import annotations

from typing import ClassVar, final

from gpp.mechanisms.weight_versions.base import AbstractVersionPolicy, Backward
from gpp.mechanisms.weight_versions.corrections.base import AbstractCorrection
from gpp.settings import Count, settings
from gpp.weights.base import PipelinePosition


@final
@settings("strategy.weights")
class EquallyLate(AbstractVersionPolicy):
    """Both passes of mini-batch t use version t - delay at every stage.

    Args:
        delay: updates by which every stage is late.
    """

    in_step: ClassVar[bool] = True
    accumulation: Count | None = None
    correction: AbstractCorrection | None = None
    delay: Count = 2

    @property
    def backward(self) -> Backward:
        return "same"

    def forward_version(self, position: PipelinePosition, microbatch: int, start: int = 0) -> int:
        return max(start, position.batch(microbatch) - self.delay)

    def least_accumulation(self, depth: int) -> int:
        # The first stage is ahead of its own updates by depth - 1 micro-batches: these must not be more than `delay` updates.
        return max(1, -(-(depth - 1) // self.delay))
