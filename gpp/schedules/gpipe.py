"""GPipe: all forwards, then all backwards (Huang et al. 2019). Every stage keeps the whole mini-batch."""

from __future__ import annotations

from typing import ClassVar, final

from gpp.cost.holding import EVERYTHING, Holding
from gpp.plan.plan import Plan
from gpp.program.kinds import BACKWARD, FORWARD, PASS
from gpp.schedules.base import Pass, StageSchedule
from gpp.settings import settings


@final
@settings("strategy.schedule")
class GPipe(StageSchedule):
    """All forwards, then all backwards, both in the order of the micro-batches."""

    holds: ClassVar[Holding] = EVERYTHING
    alternates: ClassVar[bool] = True

    def warmup(self, plan: Plan, stage: int, num_microbatches: int) -> int:
        return num_microbatches

    def order(self, plan: Plan, stage: int, num_microbatches: int) -> list[Pass]:
        return [(PASS[FORWARD], m) for m in range(num_microbatches)] + [(PASS[BACKWARD], m) for m in range(num_microbatches)]
