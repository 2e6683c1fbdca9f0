"""Vertical sync (PipeDream's option): a micro-batch uses one version at all stages, the first stage's at its entry.

So its gradient is one of the whole model at one point, D - 1 updates old everywhere, and late stages, which would have newer
weights, keep old ones for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from gpp.weights.base import COPY, AbstractActual, Backward, Place, Traffic, check_accumulation


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class VerticalSync(AbstractActual):
    """Stashing with the version of the stage that is furthest from the sink."""

    in_step: ClassVar[bool] = True
    name: ClassVar[str] = "vertical_sync"
    accumulation: int | None = 1

    def __post_init__(self) -> None:
        check_accumulation(self.accumulation)

    @property
    def backward(self) -> Backward:
        return "same"

    def forward_version(self, place: Place, microbatch: int, start: int = 0) -> int:
        return max(start, (microbatch - (place.depth - 1)) // place.accumulation)

    def copies(self, place: Place) -> int:
        return -(-(place.depth - 1) // place.accumulation) + 1

    def most_copies(self, depth: int) -> int:
        return -(-(depth - 1) // (self.accumulation or 1)) + 1

    def least_accumulation(self, depth: int) -> int:
        return 1

    def traffic(self, place: Place, prediction: float) -> Traffic:
        return Traffic(update=COPY if self.copies(place) > 1 else 0.0)
