"""PipeMare's second technique, discrepancy correction (Yang et al., MLSys 2021, arXiv 1910.05124).

Forwards use the latest weights, and so do updates; nothing is kept. The backward of a micro-batch goes back to what its forward
used, a number tau of updates ago, along a running mean of the updates:

    W' = W - tau d,    d <- g d + (1 - g) (W_new - W_old),    g = D^(1 / tau)

where D says how much the mean remembers of the update before the forward. The first technique, lower rates in the beginning,
is `strategy/weights/correction=rescheduled`.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, final

from pydantic import Field

from gpp.mechanisms.weight_versions.base import AbstractVersionPolicy, Backward
from gpp.mechanisms.weight_versions.costs import ALONG_THE_DRIFT, Extrapolation
from gpp.settings import settings
from gpp.weights.base import PipelinePosition


@final
@settings("strategy.weights")
class PipeMare(AbstractVersionPolicy):
    """Backwards on weights that are extrapolated into the past.

    Args:
        discrepancy: D; 0.135, about exp(-2), as published.
    """

    drifts: ClassVar[Extrapolation | None] = ALONG_THE_DRIFT
    discrepancy: Annotated[float, Field(gt=0, lt=1)] = 0.135

    @property
    def backward(self) -> Backward:
        return "predicted"

    def backward_horizon(self, position: PipelinePosition) -> int:
        return -self.staleness(position)

    def drift_memory(self, position: PipelinePosition) -> float:
        delay = self.staleness(position)
        return self.discrepancy ** (1.0 / delay) if delay else 0.0
