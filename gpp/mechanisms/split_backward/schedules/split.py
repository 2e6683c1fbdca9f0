"""The common part of schedules that split backwards: one order, which follows from what a stage holds."""

from __future__ import annotations

from abc import ABC

from gpp.errors import InvalidPlan
from gpp.mechanisms.split_backward.kinds import INPUT_GRADIENTS, WEIGHT_GRADIENTS
from gpp.plan.plan import Plan
from gpp.program.kinds import FORWARD, PASS
from gpp.schedules.base import Pass, StageSchedule


class AbstractSplit(StageSchedule, ABC):
    """Forwards ahead, then one first half, one second half and one forward in turn.

    The second half is that of an earlier micro-batch by as many as the stage holds late (`Plan.late`): for equal micro-batches by
    D - h under a schedule that holds one more in full for each stage (H1), by 2 (D - h) under one that holds two (H2).
    """

    def warmup(self, plan: Plan, stage: int, num_microbatches: int) -> int | None:
        own = plan.stages[stage]
        return min(own.ahead, num_microbatches) if own.k == 1 else None

    def order(self, plan: Plan, stage: int, num_microbatches: int) -> list[Pass]:
        own = plan.stages[stage]
        if own.k != 1:
            raise InvalidPlan(
                f"stage {stage}: k={own.k} passes of one direction in a row, and a schedule that splits backwards needs k=1. Fix: "
                "plan with strategy.planner.per_stage=false, or use strategy/schedule=1f1b"
            )
        ahead, late = min(own.ahead, num_microbatches), plan.late(stage, self.holds)
        out: list[Pass] = [(PASS[FORWARD], m) for m in range(ahead)]
        for m in range(num_microbatches + late):
            if m < num_microbatches:
                out.append((INPUT_GRADIENTS, m))
            if 0 <= m - late < num_microbatches:
                out.append((WEIGHT_GRADIENTS, m - late))
            if m + ahead < num_microbatches:
                out.append((PASS[FORWARD], m + ahead))
        return out
