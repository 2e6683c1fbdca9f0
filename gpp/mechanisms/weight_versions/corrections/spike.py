"""Spike compensation (Kosson et al., "Pipelined Backpropagation at Scale", MLSys 2021, arXiv 2003.11666).

A gradient that comes D updates late has missed D steps in which momentum m would have taken it up. They are made up for
at once: with v <- m v + g,

    W <- W - r (a v + b g),    a = m^D,    b = (1 - m^D) / (1 - m),

so that over all steps the gradient counts 1 / (1 - m) times, as it does without a delay.
"""

from __future__ import annotations

from typing import ClassVar, final

from gpp.mechanisms.weight_versions.corrections.base import AbstractCorrection, Cost, Direction
from gpp.settings import settings
from gpp.weights.base import WeightWork


@final
@settings("strategy.weights.correction")
class Spike(AbstractCorrection):
    """For SGD with momentum."""

    name: ClassVar[str] = "spike"
    # The gradient with its decay, then the two sums beside the optimizer's own step.
    cost: ClassVar[Cost] = Cost(update=WeightWork(9.0, 3))

    def direction(self, momentum: float, delay: int) -> Direction:
        left = momentum**delay
        return Direction(momentum=left, gradient=(1.0 - left) / (1.0 - momentum))
