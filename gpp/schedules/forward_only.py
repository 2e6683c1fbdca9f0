"""Forward passes only: evaluation on held-out data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from gpp.cost.holding import DEPTH, Holding
from gpp.plan.plan import Plan
from gpp.program.kinds import FORWARD, PASS
from gpp.schedules.base import Pass, StageSchedule


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardOnly(StageSchedule):
    """Every micro-batch once, nothing kept."""

    holds: ClassVar[Holding] = DEPTH

    def order(self, plan: Plan, stage: int, num_microbatches: int) -> list[Pass]:
        return [(PASS[FORWARD], m) for m in range(num_microbatches)]
