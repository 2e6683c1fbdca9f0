"""1F1B whose backwards are in two halves, the second one right behind the first.

The gradients of a stage's inputs leave before those of its weights are made, so that the way back along the pipeline is shorter:
filling and draining take (D - 1)(F + I) in place of 1F1B's (D - 1)(F + I + W), and stages hold what they hold under 1F1B.
"""

from __future__ import annotations

from typing import ClassVar, final

from gpp.cost.holding import Holding
from gpp.mechanisms.split_backward.kinds import HALVES
from gpp.mechanisms.split_backward.schedules.split import AbstractSplit
from gpp.settings import settings


@final
@settings("strategy.schedule")
class Split1F1B(AbstractSplit):
    """One forward and both halves of a backward in turn; h micro-batches at distance h to the sink."""

    holds: ClassVar[Holding] = Holding(parts=HALVES)
