"""A planner of a user's own, which knows of memory only that `predict` is infinite where it lacks."""

from __future__ import annotations

from typing import final

import pytest

from gpp import OneFOneB, Plan, Strategy
from gpp.cost.problem import Problem
from gpp.errors import Infeasible
from gpp.plan.build import make_plan
from gpp.planners.base import AbstractPlanner, Predict
from gpp.schedules.base import AbstractSchedule
from gpp.settings import settings
from tests.extending.eager_1f1b import Eager1F1B
from tests.support.graphs import chain, problem


def candidates(prob: Problem) -> list[Plan]:
    """All operators on every device, or a half on each."""
    every, half = prob.graph.all_mask, (1 << prob.graph.num_ops // 2) - 1
    ways = [(every, prob.cluster.num_devices)], [(half, 1), (every & ~half, 1)]
    return [make_plan(prob, "own", parts, size) for parts in ways for size in prob.microbatch_sizes() if size > 1]


@final
@settings("strategy.planner")
class WholeOrHalves(AbstractPlanner):
    """The candidate that is predicted to be fastest: large micro-batches, which take memory, since a pass has a fixed cost."""

    def plan(self, problem: Problem, predict: Predict) -> Plan:
        return min(candidates(problem), key=lambda plan: predict(plan).metrics.iteration_s)


@pytest.mark.parametrize("schedule", [OneFOneB(), Eager1F1B()], ids=lambda schedule: schedule.name)
def test_a_search_by_predictions_alone_finds_the_fastest_plan_that_fits(schedule: AbstractSchedule) -> None:
    strategy, roomy = Strategy(name="own", planner=WholeOrHalves(), schedule=schedule), problem(chain(8), 2, 8, fixed_s=1.0)
    posed = strategy.posed(roomy)
    told = [strategy.predict(plan, roomy).metrics for plan in candidates(posed)]
    needs = [max(metrics.peak_memory_bytes.values()) for metrics in told]
    for limit in sorted(set(needs)):
        tight = problem(chain(8), 2, 8, fixed_s=1.0, memory_bytes=limit)
        step_s = strategy.predict(strategy.plan(tight), tight).metrics.iteration_s
        fitting = (metrics.iteration_s for metrics, need in zip(told, needs, strict=True) if need <= limit)
        assert step_s == pytest.approx(min(fitting), rel=1e-12)
    assert min(needs) < needs[told.index(min(told, key=lambda metrics: metrics.iteration_s))], "memory decides"
    with pytest.raises(Infeasible, match="bytes on a device"):
        strategy.plan(problem(chain(8), 2, 8, fixed_s=1.0, memory_bytes=min(needs) - 1))
