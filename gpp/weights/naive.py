"""Naive: every pass uses whatever is there. A control: forward and backward of a micro-batch disagree."""

from __future__ import annotations

from typing import ClassVar, final

from gpp.settings import Count, settings
from gpp.weights.base import AbstractActual, Backward, PipelinePosition, Traffic


@final
@settings("strategy.weights")
class Naive(AbstractActual):
    """The latest weights in forward and backward, which are different ones: the gradient is that of no function."""

    name: ClassVar[str] = "naive"
    repeats: ClassVar[bool] = False
    accumulation: Count | None = 1

    @property
    def backward(self) -> Backward:
        return "current"

    def forward_version(self, place: PipelinePosition, microbatch: int, start: int = 0) -> int:
        return place.latest(microbatch, start)

    def copies(self, place: PipelinePosition) -> int:
        return 1

    def most_copies(self, depth: int) -> int:
        return 1

    def least_accumulation(self, depth: int) -> int:
        return 1

    def traffic(self, place: PipelinePosition, prediction: float) -> Traffic:
        return Traffic()
