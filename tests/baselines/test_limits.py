"""What an engine cannot run is known to the planner that plans for it."""

from dataclasses import dataclass, replace

import pytest

from baselines.deepspeed import DeepSpeed
from baselines.torch_pipelining import TorchPipelining
from gpp import OneFOneB, Plan, Sequential, Strategy
from gpp.cost.problem import Problem
from gpp.errors import Infeasible
from gpp.plan.build import make_plan
from gpp.planners.base import AbstractPlanner, Predict
from gpp.runtime.task import EngineTask
from tests.support.graphs import chain, with_weights
from tests.support.problems import Rate, cluster


def heavy_passes() -> Problem:
    """A pass takes as long for one sample as for many, and updates take long too: two stages of one micro-batch are best."""
    graph = with_weights(chain(4), 750_000_000)
    return Problem(graph=graph, cost=Rate(flop_per_s=1e30), cluster=cluster(2, 1e15), minibatch_size=8)


def task(problem: Problem, *losses: int, clips: bool = False) -> EngineTask:
    return EngineTask(graph=problem.graph, losses={f"loss:{op}": op for op in losses}, clips=clips)


def strategy(planner: AbstractPlanner) -> Strategy:
    return Strategy(name="test", planner=planner, schedule=OneFOneB())


def shape(plan: Plan) -> tuple[int, int]:
    """(stages, micro-batches)"""
    return len(plan.stages), plan.minibatch_size // plan.stages[0].microbatch_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Stubborn(AbstractPlanner):
    """Two stages, whoever is to run them, on whole mini-batches unless it is told otherwise."""

    def plan(self, problem: Problem, predict: Predict) -> Plan:
        return make_plan(problem, "stubborn", [(3, 1), (12, 1)], problem.microbatch_size or problem.minibatch_size, chain=True)


def test_a_micro_batch_for_each_stage_of_torchs_1f1b() -> None:
    problem, engine, planned = heavy_passes(), TorchPipelining(), strategy(Sequential(replication=False))
    assert shape(planned.plan(problem)) == (2, 1)
    limited = replace(problem, refuses=engine.limits(task(problem, 3)))
    plan = planned.plan(limited)
    engine.check(plan)
    # The best of what is allowed: two of two beat the model in one piece, and four micro-batches.
    assert shape(plan) == (2, 2)
    assert shape(planned.plan(replace(problem, refuses=TorchPipelining(schedule="GPipe").limits(task(problem, 3))))) == (2, 1)


def test_a_planner_that_predicts_nothing_is_asked_for_other_micro_batches() -> None:
    problem = heavy_passes()
    limited = replace(problem, refuses=TorchPipelining().limits(task(problem, 3)))
    assert shape(strategy(Stubborn()).plan(limited)) == (2, 2)
    # Imposed, they are not: what is left is the model in one piece.
    assert shape(strategy(Stubborn()).plan(replace(limited, microbatch_size=8))) == (1, 1)


def test_no_loss_before_the_last_stage() -> None:
    problem = heavy_passes()
    planned = strategy(Sequential(replication=False))
    for engine in (DeepSpeed(), TorchPipelining(schedule="GPipe")):
        limits = engine.limits(task(problem, 1, 3))
        assert limits(planned.plan(problem)) is not None
        plan = planned.plan(replace(problem, refuses=limits))
        assert limits(plan) is None and set(plan.stages[-1].ops) >= {1, 3}


def test_deepspeed_counts_a_shared_weight_twice_where_it_clips() -> None:
    graph = heavy_passes().graph
    shared = tuple(replace(op, params=("w0",)) if i in (0, 3) else op for i, op in enumerate(graph.ops))
    problem = replace(heavy_passes(), graph=replace(graph, ops=shared, params=tuple(p for p in graph.params if p.name != "w3")))
    assert shape(strategy(Sequential(replication=False)).plan(problem))[0] == 2
    for clips, stages in ((False, 2), (True, 1)):
        limited = replace(problem, refuses=DeepSpeed().limits(task(problem, 3, clips=clips)))
        assert shape(strategy(Sequential(replication=False)).plan(limited))[0] == stages


def test_where_no_plan_can_run_the_engine_s_reason_is_given() -> None:
    problem = heavy_passes()
    limited = replace(problem, refuses=TorchPipelining(schedule="ZBVZeroBubble").limits(task(problem, 3)))
    with pytest.raises(Infeasible, match=r"torch's ZBVZeroBubble places stages.*another plan, or engine.schedule=1F1B"):
        strategy(Sequential(replication=False)).plan(limited)
