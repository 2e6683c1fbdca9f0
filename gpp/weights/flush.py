"""Flush: the pipeline drains before every update (GPipe, DAPPLE, PipeDream-Flush). One version, no staleness."""

from __future__ import annotations

from typing import ClassVar, final

from gpp.settings import Count, settings
from gpp.weights.base import AbstractActual, Backward, PipelinePosition


@final
@settings("strategy.weights")
class Flush(AbstractActual):
    """Every pass of a mini-batch uses the version that the update before it left."""

    flushes: ClassVar[bool] = True
    in_step: ClassVar[bool] = True
    accumulation: Count | None = None

    @property
    def backward(self) -> Backward:
        return "same"

    def forward_version(self, position: PipelinePosition, microbatch: int, start: int = 0) -> int:
        return position.batch(microbatch)

    def least_accumulation(self, depth: int) -> int:
        return 1
