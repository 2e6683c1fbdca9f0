"""Vertical sync (PipeDream's option): a micro-batch uses one version at all stages, the first stage's at its entry.

So its gradient is one of the whole model at one point, D - 1 updates old everywhere, and late stages, which would have newer
weights, keep old ones for it.
"""

from __future__ import annotations

from typing import ClassVar, final

from gpp.mechanisms.weight_versions.base import AbstractRing
from gpp.mechanisms.weight_versions.corrections.base import AbstractCorrection
from gpp.settings import Count, settings
from gpp.weights.base import PipelinePosition


@final
@settings("strategy.weights")
class VerticalSync(AbstractRing):
    """Stashing with the version of the stage that is furthest from the sink."""

    in_step: ClassVar[bool] = True
    accumulation: Count | None = None
    correction: AbstractCorrection | None = None

    def lag(self, position: PipelinePosition) -> int:
        return position.depth - 1
