"""Flush: the pipeline drains before every update (GPipe, DAPPLE, PipeDream-Flush). One version, no staleness."""

from __future__ import annotations

from typing import ClassVar, final

from gpp.settings import Count, settings
from gpp.weights.base import AbstractWeights


@final
@settings("strategy.weights")
class Flush(AbstractWeights):
    """Every pass of a mini-batch uses the version that the update before it left."""

    flushes: ClassVar[bool] = True
    accumulation: Count | None = None
