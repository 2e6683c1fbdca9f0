"""Ways to use an engine's devices: a chain of stages that all have as many replicas, and all split their operators alike.

8 devices    8 stages | 4 stages of 2 replicas | 4 stages split in 2 | 2 stages of 2 replicas, each split in 2 | ...

Each way is a smaller problem, in which what runs a stage is one device. A planner of chains plans it, and its plan is expanded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from gpp.cost.problem import Problem, divisors
from gpp.plan.plan import Plan
from gpp.strategy import Strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineWay:
    """A problem to be planned in place of another one.

    Args:
        expand: the other problem's plan, from one of this.
    """

    problem: Problem
    strategy: Strategy
    expand: Callable[[Plan], Plan]

    def then(self, other: EngineWay) -> EngineWay:
        """This way, and within its problem the other one."""
        return replace(other, expand=lambda plan: self.expand(other.expand(plan)))


def of_replicas(problem: Problem, strategy: Strategy) -> Iterator[EngineWay]:
    """Pipelines side by side, each with its share of the mini-batch: stage by stage their devices are replicas.

    A plan of the smaller problem leaves out the sums of gradients over replicas, which an expanded plan's prediction has.
    """
    cluster = problem.cluster
    if not cluster.homogeneous or cluster.hosts or cluster.links or problem.minibatch_ops or problem.copies:
        return
    for count in divisors(cluster.num_devices)[1:]:
        if problem.minibatch_size % count or (problem.microbatch_size or count) % count:
            continue
        if problem.max_replicas is not None and count > problem.max_replicas:
            continue
        fewer = replace(cluster, devices=cluster.devices[::count], nodes=cluster.nodes[::count])
        size = problem.microbatch_size and problem.microbatch_size // count
        posed = replace(problem, cluster=fewer, minibatch_size=problem.minibatch_size // count, microbatch_size=size)
        yield EngineWay(problem=posed, strategy=strategy, expand=lambda plan, count=count: _side_by_side(plan, count))


def _side_by_side(plan: Plan, count: int) -> Plan:
    stages = tuple(
        replace(
            stage,
            devices=tuple(count * device + i for device in stage.devices for i in range(count)),
            microbatch_size=stage.microbatch_size * count,
            in_flight=stage.in_flight * count,
        )
        for stage in plan.stages
    )
    return replace(plan, stages=stages, minibatch_size=plan.minibatch_size * count)
