"""The whole model as one stage on the first device.

Objective: none; there is one plan for each micro-batch size, and without an imposed one the mini-batch is not cut.

Constraints: memory, which `Plan.validate` checks.

Complexity: O(1).

Departures: none; it is what PyTorch does without a pipeline.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from gpp.cost.problem import Problem
from gpp.plan import Plan, make_plan
from gpp.planners.base import AbstractPlanner, Predict


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Single(AbstractPlanner):
    """One stage, one device."""

    def plan(self, problem: Problem, predict: Predict) -> Plan:
        b = problem.microbatch_size or problem.minibatch_size
        return make_plan(problem, "single", [(problem.graph.all_mask, 1)], b)
