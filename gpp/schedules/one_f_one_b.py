"""Synchronous 1F1B, and kFkB, on a DAG of stages.

A stage runs as many forwards ahead as its in-flight samples allow (its distance to the sink for equal
micro-batches), then alternates k backwards and k forwards, then drains. Source: PipeDream-flush
(Narayanan et al. 2021) for chains; GraphPipe, section 6, for DAGs.
"""

from __future__ import annotations

from typing import ClassVar, final

from gpp.cost.holding import DEPTH, Holding
from gpp.plan.plan import Plan
from gpp.program.kinds import BACKWARD, FORWARD, PASS
from gpp.schedules.base import Pass, StageSchedule
from gpp.settings import settings
from gpp.stage import Stage


@final
@settings("strategy.schedule")
class OneFOneB(StageSchedule):
    """Warm-up, steady one-forward-one-backward, drain."""

    holds: ClassVar[Holding] = DEPTH

    @property
    def name(self) -> str:
        return "1f1b"

    def warmup(self, plan: Plan, stage: int, num_microbatches: int) -> int | None:
        return self._ahead(plan.stages[stage], num_microbatches) if plan.stages[stage].k == 1 else None

    @staticmethod
    def _ahead(stage: Stage, num_microbatches: int) -> int:
        return min(stage.ahead, num_microbatches)

    def order(self, plan: Plan, stage: int, num_microbatches: int) -> list[Pass]:
        s = plan.stages[stage]
        forward = self._ahead(s, num_microbatches)
        out: list[Pass] = [(PASS[FORWARD], m) for m in range(forward)]
        backward = 0
        while backward < num_microbatches:
            # Never a backward whose forward has not run, should k exceed what is in flight.
            stop = min(backward + s.k, forward)
            out += [(PASS[BACKWARD], m) for m in range(backward, stop)]
            backward = stop
            stop = min(forward + s.k, num_microbatches)
            out += [(PASS[FORWARD], m) for m in range(forward, stop)]
            forward = stop
        return out
