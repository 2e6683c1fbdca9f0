"""The whole model as one stage on the first device.

Objective: none; there is one plan for each micro-batch size, and without an imposed one the mini-batch is not cut.

Constraints: memory.

Complexity: O(1).

Departures: none; it is what PyTorch does without a pipeline.
"""

from __future__ import annotations

from typing import final

from gpp.cost.problem import Problem
from gpp.plan.plan import Plan
from gpp.planners.base import AbstractPlanner, Predict
from gpp.planners.chains.data_parallel import whole_model
from gpp.settings import settings


@final
@settings("strategy.planner")
class Single(AbstractPlanner):
    """One stage, one device."""

    def plan(self, problem: Problem, predict: Predict) -> Plan:
        """The whole model on device 0.

        >>> str(Single().plan(problem, predict)).splitlines()[0]
        'single: depth 1, mini-batch 4'
        """
        return whole_model(problem, "single", 1)
