"""ZB-H2 (Qi et al., "Zero Bubble Pipeline Parallelism", 2024), on a DAG of stages.

Twice as many forwards ahead as in 1F1B, so that a device has forwards to run while the first gradients are on their way. Filling
and draining take (D - 1)(F + I - 2W), nothing where the three are equal, in about twice the memory of H1. That needs an update
of each stage by itself: a norm over all stages would make all devices meet between two steps.
"""

from __future__ import annotations

from typing import ClassVar, final

from gpp.cost.holding import Holding
from gpp.mechanisms.split_backward.kinds import HALVES
from gpp.mechanisms.split_backward.schedules.split import AbstractSplit
from gpp.settings import settings


@final
@settings("strategy.schedule")
class ZeroBubbleH2(AbstractSplit):
    """Every stage holds 2D - 1 micro-batches; at distance h from the sink, 2h - 1 of them in full."""

    holds: ClassVar[Holding] = Holding(ahead=2, levels=True, parts=HALVES)
    overlaps_steps: ClassVar[bool] = True
