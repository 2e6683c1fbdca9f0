"""1F1B that does not drain between mini-batches (PipeDream, SOSP '19), on a DAG of stages.

A stage runs as many forwards ahead as its distance to the sink, then alternates one forward and one backward for as long as there
are mini-batches; the update comes right after the last backward of each.
"""

from __future__ import annotations

from typing import ClassVar, final

from gpp.cost.holding import DEPTH, Holding
from gpp.errors import InvalidPlan
from gpp.plan.plan import Plan
from gpp.program.added import ordered
from gpp.program.kinds import BACKWARD, FORWARD, PASS
from gpp.program.program import Task
from gpp.schedules.base import Pass, StageSchedule
from gpp.schedules.flow import Work
from gpp.settings import settings


@final
@settings("strategy.schedule")
class NoFlush(StageSchedule):
    """Warm-up once, then one forward, one backward; a drain only at the end."""

    holds: ClassVar[Holding] = DEPTH
    drains: ClassVar[bool] = False

    def orders(self, work: Work) -> dict[int, list[Task]]:
        own = ordered(work.plan, work.graph, work.num_samples)
        return StageSchedule.orders(self, work) if own is None else own

    def warmup(self, plan: Plan, stage: int, num_microbatches: int) -> int:
        s = plan.stages[stage]
        if s.k != 1:
            rule = "needs k=1. Fix: plan with strategy.planner.per_stage=false, or drain (strategy/weights=flush)"
            raise InvalidPlan(f"stage {stage} alternates {s.k} forwards and backwards; a pipeline without drains {rule}")
        return min(s.ahead, num_microbatches)

    def order(self, plan: Plan, stage: int, num_microbatches: int) -> list[Pass]:
        ahead = self.warmup(plan, stage, num_microbatches)
        out: list[Pass] = [(PASS[FORWARD], m) for m in range(ahead)]
        for m in range(num_microbatches):
            out.append((PASS[BACKWARD], m))
            if m + ahead < num_microbatches:
                out.append((PASS[FORWARD], m + ahead))
        return out
