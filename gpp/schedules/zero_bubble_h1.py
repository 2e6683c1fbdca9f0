"""ZB-H1 (Qi et al., "Zero Bubble Pipeline Parallelism", 2024), on a DAG of stages.

1F1B in which the second halves of backwards wait, until a stage holds as many micro-batches as the first one: D. They fill the
time in which the pipeline drains. Filling and draining take (D - 1)(F + I - W) in place of 1F1B's (D - 1)(F + I + W), in the
memory that 1F1B takes on its first device.
"""

from __future__ import annotations

from typing import ClassVar, final

from gpp.cost.holding import Holding
from gpp.schedules.split import AbstractSplit
from gpp.settings import settings


@final
@settings("strategy.schedule")
class ZeroBubbleH1(AbstractSplit):
    """Every stage holds D micro-batches, those at distance h to the sink h of them in full."""

    holds: ClassVar[Holding] = Holding(levels=True, splits=True)
