"""Naive: every pass uses whatever is there. A control: forward and backward of a micro-batch disagree."""

from __future__ import annotations

from typing import ClassVar, final

from gpp.mechanisms.weight_versions.base import AbstractVersionPolicy, Backward
from gpp.mechanisms.weight_versions.corrections.base import AbstractCorrection
from gpp.settings import Count, settings
from gpp.weights.base import PipelinePosition


@final
@settings("strategy.weights")
class Naive(AbstractVersionPolicy):
    """The latest weights in forward and backward, which are different ones: the gradient is that of no function."""

    repeats: ClassVar[bool] = False
    accumulation: Count | None = None
    correction: AbstractCorrection | None = None

    @property
    def backward(self) -> Backward:
        return "current"

    def forward_version(self, position: PipelinePosition, microbatch: int, start: int = 0) -> int:
        return position.latest(microbatch, start)
