"""ZB-H1 (Qi et al., "Zero Bubble Pipeline Parallelism", 2024), on a DAG of stages.

1F1B in which the second halves of backwards wait, until a stage holds as many micro-batches as the first one: D. They fill the
time in which the pipeline drains. Filling and draining take (D - 1)(F + I - W) in place of 1F1B's (D - 1)(F + I + W), in the
memory that 1F1B takes on its first device.

Three stages, five micro-batches, F = I = W. The same work as in the picture of `gpp.schedules.one_f_one_b` is over after 17 units,
not 21, because W waits until there is no I to make, or until D = 3 micro-batches are held:

    s0   F0 F1 F2 .  .  I0 W0 F3 I1 W1 F4 I2 W2 I3 W3 I4 W4
    s1   .  F0 F1 .  I0 F2 I1 W0 F3 I2 W1 F4 I3 W2 I4 W3 W4
    s2   .  .  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 F4 I4 W2 W3 W4
"""

from __future__ import annotations

from typing import ClassVar, final

from gpp.cost.holding import Holding
from gpp.mechanisms.split_backward.kinds import HALVES
from gpp.mechanisms.split_backward.schedules.split import AbstractSplit
from gpp.settings import settings


@final
@settings("strategy.schedule")
class ZeroBubbleH1(AbstractSplit):
    """Every stage holds D micro-batches; at distance h from the sink, h of them in full."""

    holds: ClassVar[Holding] = Holding(levels=True, parts=HALVES)
