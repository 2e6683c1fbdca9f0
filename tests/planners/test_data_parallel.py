from __future__ import annotations

from dataclasses import replace

import pytest

from gpp.cost.models.constant import Constant
from gpp.cost.problem import Problem
from gpp.errors import Infeasible
from gpp.mechanisms.weight_versions.stash import Stash
from gpp.planners.base import AbstractPlanner
from gpp.planners.chains.data_parallel import DataParallel
from gpp.planners.chains.single import Single
from gpp.schedules.no_flush import NoFlush
from gpp.strategy import Strategy
from tests.support.problems import cluster, towers

PROBLEM = Problem(graph=towers(2, 4), cluster=cluster(4), cost=Constant(), minibatch_size=32)


def plan(problem: Problem):
    return DataParallel().plan(problem, lambda plan: pytest.fail("nothing to choose from"))


@pytest.mark.parametrize("imposed", [None, 8])
@pytest.mark.parametrize(("planner", "devices"), [(DataParallel(), (0, 1, 2, 3)), (Single(), (0,))])
def test_everything_on_every_device_or_on_the_first(
    planner: AbstractPlanner, devices: tuple[int, ...], imposed: int | None
) -> None:
    problem = replace(PROBLEM, microbatch_size=imposed)
    found = planner.plan(problem, lambda plan: pytest.fail("nothing to choose from"))
    found.validate(problem)
    (stage,) = found.stages
    assert stage.devices == devices and stage.microbatch_size == stage.in_flight == (imposed or 32)


def test_shards_are_equal_or_refused() -> None:
    with pytest.raises(Infeasible, match=r"micro-batch of 2 samples cannot be cut.*a micro-batch of 4 samples"):
        plan(replace(PROBLEM, microbatch_size=2))
    with pytest.raises(Infeasible, match=r"mini-batch of 30 samples cannot be cut.*a mini-batch of 32 samples"):
        plan(replace(PROBLEM, minibatch_size=30))
    with pytest.raises(Infeasible, match="1 times at most"):
        plan(replace(PROBLEM, max_replicas=1))


@pytest.mark.parametrize("planner", [DataParallel(), Single()], ids=lambda planner: planner.name)
def test_a_mini_batch_is_the_runs_own_where_the_pipeline_does_not_drain(planner: AbstractPlanner) -> None:
    strategy = Strategy(name="test", planner=planner, schedule=NoFlush(), weights=Stash())
    assert strategy.plan(PROBLEM).stages[0].microbatch_size == 32
    if isinstance(planner, DataParallel):
        with pytest.raises(Infeasible, match=r"minibatch_size=32\)"):
            strategy.plan(replace(PROBLEM, minibatch_size=30))
