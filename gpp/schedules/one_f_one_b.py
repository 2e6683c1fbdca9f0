"""Synchronous 1F1B, and kFkB, on a DAG of stages.

A stage runs as many forwards ahead as its in-flight samples allow (its distance to the sink for equal
micro-batches), then alternates k backwards and k forwards, then drains. Source: PipeDream-flush
(Narayanan et al. 2021) for chains; GraphPipe, section 6, for DAGs.

Three stages with 3, 2 and 1 samples in flight, five micro-batches of one sample, k = 1. A backward takes twice a forward's time:

    s0   F0 F1 F2 .  .  .  .  B0 -- F3 B1 -- F4 B2 -- .  B3 -- .  B4 --
    s1   .  F0 F1 .  .  B0 -- F2 B1 -- F3 B2 -- F4 B3 -- .  B4 --
    s2   .  .  F0 B0 -- F1 B1 -- F2 B2 -- F3 B3 -- F4 B4 --
    s0:  ahead              | steady          | drain
"""

from __future__ import annotations

from typing import ClassVar, final

from gpp.cost.holding import DEPTH, Holding
from gpp.plan.plan import Plan
from gpp.program.kinds import BACKWARD, FORWARD, PASS
from gpp.schedules.base import Pass, StageSchedule
from gpp.settings import settings


@final
@settings("strategy.schedule")
class OneFOneB(StageSchedule):
    """Warm-up, steady one-forward-one-backward, drain."""

    holds: ClassVar[Holding] = DEPTH
    alternates: ClassVar[bool] = True

    @property
    def name(self) -> str:
        return "1f1b"

    def warmup(self, plan: Plan, stage: int, num_microbatches: int) -> int | None:
        return min(plan.stages[stage].ahead, num_microbatches) if plan.stages[stage].k == 1 else None

    def order(self, plan: Plan, stage: int, num_microbatches: int) -> list[Pass]:
        """The passes of one stage.

        >>> " ".join(f"{kind}{m}" for kind, m in OneFOneB().order(plan, 0, 4))
        'F0 F1 B0 F2 B1 F3 B2 B3'
        """
        s = plan.stages[stage]
        forward = min(s.ahead, num_microbatches)
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
