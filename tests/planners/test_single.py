from __future__ import annotations

import pytest

from gpp.cost.models.constant import Constant
from gpp.cost.problem import Problem
from gpp.planners.chains.single import Single
from tests.support.problems import cluster, towers


@pytest.mark.parametrize("imposed", [None, 4])
def test_everything_on_the_first_device(imposed: int | None) -> None:
    problem = Problem(graph=towers(2, 4), cluster=cluster(4), cost=Constant(), minibatch_size=32, microbatch_size=imposed)
    plan = Single().plan(problem, lambda plan: pytest.fail("nothing to choose from"))
    plan.validate(problem)
    assert [stage.devices for stage in plan.stages] == [(0,)]
    assert plan.stages[0].microbatch_size == plan.stages[0].in_flight == (imposed or 32)
