"""A schedule of your own, in one file: 1F1B whose stages run further ahead, so that messages that take long delay nobody.

Two stages, four micro-batches, `ahead=2`; under 1F1B the first one would begin with F0 F1:

    s0   F0 F1 F2 .  B0 -- F3 B1 -- B2 -- B3 --
    s1   .  F0 B0 -- F1 B1 -- F2 B2 -- F3 B3 --
"""

from __future__ import annotations

from typing import final

from gpp.cost.holding import Holding
from gpp.plan.plan import Plan
from gpp.program.kinds import BACKWARD, FORWARD, PASS
from gpp.schedules.base import Pass, StageSchedule
from gpp.settings import Count, settings


@final
@settings("strategy.schedule")
class Eager1F1B(StageSchedule):
    """A warm-up that is longer, then one backward and one forward in turn, then a drain.

    Args:
        ahead: forwards that a stage is ahead of the next one; 1: as 1F1B.
    """

    ahead: Count = 2

    @property
    def holds(self) -> Holding:  # pyright: ignore[reportIncompatibleVariableOverride]
        # Planners reckon memory with it, and the samples in flight of a plan's stages follow from it.
        return Holding(ahead=self.ahead)

    def warmup(self, plan: Plan, stage: int, num_microbatches: int) -> int:
        return min(plan.stages[stage].ahead, num_microbatches)

    def order(self, plan: Plan, stage: int, num_microbatches: int) -> list[Pass]:
        first = self.warmup(plan, stage, num_microbatches)
        out: list[Pass] = [(PASS[FORWARD], m) for m in range(first)]
        for m in range(num_microbatches):
            out.append((PASS[BACKWARD], m))
            if first + m < num_microbatches:
                out.append((PASS[FORWARD], first + m))
        return out
