"""One planner's cut at another planner's micro-batch size: the middle bar of GraphPipe's ablation (Figure 9, "Parallel").

A graph pipeline gains twice: it is shallower, and what it saves in memory lets the micro-batch grow. The second gain cannot be had
without the first, so the paper measures the first alone: concurrent stages, the chain's micro-batch size.

Objective: that of `planner`.

Constraints: those of `planner`, and all stages have the micro-batch size of the plan that `reference` makes of the same problem.

Complexity: both searches, one after the other; the second looks at one micro-batch size only.

Departures: the paper keeps the micro-batch size that measured best for the chain; here it is the one predicted best.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import final

from gpp.cost.problem import Problem
from gpp.errors import InvalidPlan
from gpp.plan import Plan
from gpp.planners.base import AbstractPlanner, Predict


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SameMicrobatch(AbstractPlanner):
    """Plans with `planner` at the micro-batch size of `reference`'s plan."""

    reference: AbstractPlanner
    planner: AbstractPlanner

    def plan(self, problem: Problem, predict: Predict) -> Plan:
        sizes = {stage.microbatch_size for stage in self.reference.plan(problem, predict).stages}
        if len(sizes) > 1:
            raise InvalidPlan(f"the reference's stages have different micro-batch sizes, {sorted(sizes)}: none can be imposed")
        size = sizes.pop()
        plan = self.planner.plan(replace(problem, microbatch_size=size), predict)
        text = f"micro-batch {size} is that of the reference, {type(self.reference).__name__}"
        return replace(plan, planner="same_microbatch", explanation=(text, *plan.explanation))
