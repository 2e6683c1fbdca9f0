"""Naive: every pass uses whatever is there. A control: forward and backward of a micro-batch disagree."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from gpp.weights.base import AbstractActual, Backward, PipelinePosition, check_accumulation


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Naive(AbstractActual):
    """The latest weights in forward and backward, which are different ones: the gradient is that of no function."""

    name: ClassVar[str] = "naive"
    repeats: ClassVar[bool] = False
    accumulation: int | None = 1

    def __post_init__(self) -> None:
        check_accumulation(self.accumulation)

    @property
    def backward(self) -> Backward:
        return "current"

    def forward_version(self, position: PipelinePosition, microbatch: int, start: int = 0) -> int:
        return position.latest(microbatch, start)

    def least_accumulation(self, depth: int) -> int:
        return 1
