"""Vertical sync (PipeDream's option): a micro-batch uses one version at all stages, the first stage's at its entry.

So its gradient is one of the whole model at one point, D - 1 updates old everywhere, and late stages, which would have newer
weights, keep old ones for it.
"""

from __future__ import annotations

from typing import ClassVar, final

from gpp.mechanisms.weight_versions.base import AbstractVersionPolicy
from gpp.settings import settings
from gpp.weights.base import PipelinePosition


@final
@settings("strategy.weights")
class VerticalSync(AbstractVersionPolicy):
    """Stashing with the version of the stage that is furthest from the sink."""

    in_step: ClassVar[bool] = True

    def forward_version(self, position: PipelinePosition, microbatch: int, start: int = 0) -> int:
        return max(start, (microbatch - position.depth + 1) // position.accumulation)
