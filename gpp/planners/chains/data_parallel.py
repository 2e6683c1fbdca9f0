"""The whole model on every device: one stage with as many replicas as there are devices.

Objective: none; there is one plan for each micro-batch size, and without an imposed one the mini-batch is not cut.

Constraints:
1. All replicas get equally many samples of every micro-batch, as an average over replicas demands.
2. Memory.

Complexity: O(1).

Departures: none; it is what PyTorch's DistributedDataParallel does.
"""

from __future__ import annotations

from typing import final

from gpp.cost.problem import Problem
from gpp.errors import Infeasible
from gpp.plan.build import make_plan
from gpp.plan.plan import Plan
from gpp.planners.base import AbstractPlanner, Predict
from gpp.planners.common.candidates import Assessor, Candidate
from gpp.planners.common.infeasible import explain
from gpp.planners.common.stage_costs import StageCosts
from gpp.settings import settings


@final
@settings("strategy.planner")
class DataParallel(AbstractPlanner):
    """One stage, all devices."""

    def plan(self, problem: Problem, predict: Predict) -> Plan:
        """One stage on all devices.

        >>> [stage.devices for stage in DataParallel().plan(replace(problem, microbatch_size=2), predict).stages]
        [(0, 1)]
        """
        devices = problem.cluster.num_devices
        b = size_of(problem)
        if b % devices:
            what, even = "micro-batch" if problem.microbatch_size else "mini-batch", -(-b // devices) * devices
            minibatch = problem.minibatch_size // problem.regime.minibatches
            change = f"minibatch_size={-(-minibatch // even) * even}"
            if problem.microbatch_size:
                change = f"microbatch_size={even}" + (f" {change}" if minibatch % even else "")
            raise Infeasible(
                f"a {what} of {b} samples cannot be cut into equal shards for {devices} devices",
                f"a {what} of {even} samples ({change})",
            )
        if problem.max_replicas is not None and devices > problem.max_replicas:
            raise Infeasible(
                f"the model can be replicated {problem.max_replicas} times at most (it runs at one batch size only), "
                f"not on {devices} devices",
                f"{problem.max_replicas} devices",
            )
        return whole_model(problem, "data_parallel", devices)


def whole_model(problem: Problem, planner: str, devices: int) -> Plan:
    """The plan of one stage.

    Raises:
        Infeasible: it does not fit into memory; names what would.
    """

    def attempt(problem: Problem) -> Candidate | None:
        b = size_of(problem)
        found = (
            Assessor(StageCosts(problem)).assess([(problem.graph.all_mask, devices)], b, chain=True) if b % devices == 0 else None
        )
        return found if isinstance(found, Candidate) else None

    if attempt(problem) is None:
        raise explain(problem, attempt)
    return make_plan(problem, planner, [(problem.graph.all_mask, devices)], size_of(problem))


def size_of(problem: Problem) -> int:
    """Samples of a micro-batch: those that were asked for, or a mini-batch, of which a pipeline that does not drain shows many."""
    return problem.microbatch_size or problem.minibatch_size // problem.regime.minibatches
