"""The whole model on every device: one stage with as many replicas as there are devices.

Objective: none; there is one plan for each micro-batch size, and without an imposed one the mini-batch is not cut.

Constraints:
1. All replicas get equally many samples of every micro-batch, as an average over replicas demands.
2. Memory, which `Plan.validate` checks.

Complexity: O(1).

Departures: none; it is what PyTorch's DistributedDataParallel does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from gpp.cost.problem import Problem
from gpp.errors import Infeasible
from gpp.plan import Plan, make_plan
from gpp.planners.base import AbstractPlanner, Predict


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class DataParallel(AbstractPlanner):
    """One stage, all devices."""

    def plan(self, problem: Problem, predict: Predict) -> Plan:
        devices = problem.cluster.num_devices
        b = problem.microbatch_size or problem.minibatch_size
        if b % devices:
            what = "micro-batch" if problem.microbatch_size else "mini-batch"
            raise Infeasible(
                f"a {what} of {b} samples cannot be cut into equal shards for {devices} devices",
                f"a {what} of {-(-b // devices) * devices} samples",
            )
        if problem.max_replicas is not None and devices > problem.max_replicas:
            raise Infeasible(
                f"the model can be replicated {problem.max_replicas} times at most (it runs at one batch size only), "
                f"not on {devices} devices",
                f"{problem.max_replicas} devices",
            )
        return make_plan(problem, "data_parallel", [(problem.graph.all_mask, devices)], b)
