"""Weight stashing (PipeDream, SOSP '19): the backward of a micro-batch uses the version that its forward used.

That is the latest one at the time of the forward, which differs from stage to stage: staleness is W(k) at stage k.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from gpp.weights.base import COPY, AbstractActual, Backward, Place, Traffic, check_accumulation


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Stash(AbstractActual):
    """Keeps every version that a micro-batch in flight has used: W(k) + 1 copies where each micro-batch makes an update."""

    name: ClassVar[str] = "stash"
    accumulation: int | None = 1

    def __post_init__(self) -> None:
        check_accumulation(self.accumulation)

    @property
    def backward(self) -> Backward:
        return "same"

    def forward_version(self, place: Place, microbatch: int, start: int = 0) -> int:
        return place.latest(microbatch, start)

    def copies(self, place: Place) -> int:
        return -(-place.warmup // place.accumulation) + 1

    def most_copies(self, depth: int) -> int:
        return -(-(depth - 1) // (self.accumulation or 1)) + 1

    def least_accumulation(self, depth: int) -> int:
        return 1

    def traffic(self, place: Place, prediction: float) -> Traffic:
        return Traffic(update=COPY if self.copies(place) > 1 else 0.0)
