from __future__ import annotations

from dataclasses import replace

import pytest

from gpp import OneFOneB, Strategy
from gpp.cost.models.constant import Constant
from gpp.cost.problem import Problem
from gpp.errors import Infeasible, InvalidConfig
from gpp.plan.build import make_plan
from gpp.planners.chains.even import Even, even_cut
from tests.support.graphs import chain, problem, with_weights
from tests.support.problems import cluster, run, towers


def test_cut():
    assert even_cut([1, 1, 1, 1], 2) == [(0, 2), (2, 4)]
    assert even_cut([5, 1, 1, 1], 2) == [(0, 1), (1, 4)]
    assert even_cut([0, 0, 0, 9], 4) == [(0, 1), (1, 2), (2, 3), (3, 4)]
    assert even_cut([1, 2, 3], 1) == [(0, 3)]


def test_one_stage_for_each_device_and_the_best_microbatch_that_fits():
    problem = Problem(graph=towers(2, 4), cluster=cluster(4), cost=Constant(fixed_s=0.2), minibatch_size=32)
    plan, seconds = run(Even(), problem)
    assert len(plan.stages) == plan.depth == plan.num_devices == 4
    for b in problem.microbatch_sizes():
        imposed = Problem(graph=problem.graph, cluster=problem.cluster, cost=problem.cost, minibatch_size=32, microbatch_size=b)
        assert run(Even(), imposed)[1] >= seconds


def test_more_devices_than_operators_are_refused():
    problem = Problem(graph=chain(2), cluster=cluster(3), cost=Constant(), minibatch_size=4)
    strategy = Strategy(name="test", planner=Even(), schedule=OneFOneB())
    with pytest.raises(
        InvalidConfig, match=r"cluster\.num_devices=3: .*planner=even.* 2 operators are enough for 2\..*num_devices=2"
    ):
        strategy.plan(problem)
    with pytest.raises(InvalidConfig, match=r"1 operator is enough for 1\."):
        strategy.plan(replace(problem, graph=chain(1)))
    # A plan for fewer of them is not the planner's.
    strategy.check(make_plan(problem, "test", [(1, 1), (2, 1)], 1), problem)


def test_no_memory_at_all_lacks_what_the_plan_needs():
    with pytest.raises(Infeasible, match=r"no plan found fits the 0 B .* lacks .*cluster\.memory_bytes="):
        Even().plan(problem(with_weights(chain(4)), 2, 4, memory_bytes=1e-30), lambda plan: pytest.fail("nothing fits"))
