"""One planner's cut at another planner's micro-batch size: the middle bar of GraphPipe's ablation (Figure 9, "Parallel").

A graph pipeline gains twice: it is shallower, and what it saves in memory lets the micro-batch grow. The second gain cannot be had
without the first, so the paper measures the first alone: concurrent stages, the chain's micro-batch size.

Objective: that of `planner`; the reference's own stages with the data's edges only count too.

Constraints: those of `planner`, and all stages have the micro-batch size of the plan that `reference` makes of the same problem.

Complexity: both searches, one after the other; the second looks at one micro-batch size only.

Departures: the paper keeps the micro-batch size that measured best for the chain; here it is the one predicted best.
"""

from __future__ import annotations

from dataclasses import replace
from typing import final

from gpp.cost.problem import Problem
from gpp.errors import Infeasible, InvalidPlan
from gpp.graph.op_graph import mask_of
from gpp.plan.build import make_plan
from gpp.plan.plan import Plan
from gpp.planners.base import AbstractPlanner, Predict
from gpp.settings import settings


@final
@settings("strategy.planner")
class SameMicrobatch(AbstractPlanner):
    """Plans with `planner` at the micro-batch size of `reference`'s plan."""

    reference: AbstractPlanner
    planner: AbstractPlanner

    def plan(self, problem: Problem, predict: Predict) -> Plan:
        chain = self.reference.plan(problem, predict)
        sizes = {stage.microbatch_size for stage in chain.stages}
        if len(sizes) > 1:
            raise InvalidPlan(f"the reference's stages have different micro-batch sizes, {sorted(sizes)}: none can be imposed")
        size = sizes.pop()
        text = f"micro-batch {size} is that of the reference, {type(self.reference).__name__}"
        own = self._unchained(problem, chain, size)
        try:
            plan = self.planner.plan(replace(problem, microbatch_size=size), predict)
        except Infeasible:
            if own is None:
                raise
            plan = own
        if own is not None and predict(own).metrics.iteration_s < predict(plan).metrics.iteration_s:
            plan = own
        return replace(plan, planner="same_microbatch", explanation=(text, *plan.explanation))

    @staticmethod
    def _unchained(problem: Problem, chain: Plan, size: int) -> Plan | None:
        """The reference's own stages with the data's edges only: never deeper than its chain, so they fit as it does."""
        if any(stage.spares or stage.devices_per_replica > 1 for stage in chain.stages):
            return None
        parts = [(mask_of(stage.ops), len(stage.devices)) for stage in chain.stages]
        devices = [stage.devices for stage in chain.stages]
        plan = make_plan(problem, "same_microbatch", parts, size, ordered=True, placement=devices)
        return replace(plan, explanation=("the reference's stages, side by side where the data allows",))
