from __future__ import annotations

import contextlib
import itertools

import pytest

from gpp import OneFOneB, Strategy
from gpp.cost.models.constant import Constant
from gpp.cost.problem import Problem
from gpp.errors import Infeasible, InvalidConfig, InvalidPlan
from gpp.graph.random_graphs import random_dag
from gpp.plan.build import make_plan
from tests.oracle.exhaustive import Exhaustive, convex_partitions, exchangeable
from tests.support.graphs import chain, diamond
from tests.support.problems import cluster, random_problem, run, towers


def test_partitions_of_known_graphs():
    # A chain of n operators has 2^(n-1) partitions into intervals.
    assert len(list(convex_partitions(chain(5)))) == 16
    # Of the 15 partitions of a diamond's operators three are not convex: 0 with 3 but without 1, 2, or both.
    assert len(list(convex_partitions(diamond()))) == 15 - 4


def test_partitions_are_convex_and_different():
    graph = random_dag(6, 1)
    found = list(convex_partitions(graph))
    assert len({frozenset(stages) for stages in found}) == len(found)
    assert all(graph.is_convex(stage) for stages in found for stage in stages)


def test_exchangeable_operators_are_exchanged_once():
    """Three equal branches between a fork and a join: 15 ways to group the branches' operators, 5 up to their names."""
    graph = towers(3, 1, fork=True)
    problem = Problem(graph=graph, cluster=cluster(5), cost=Constant(), minibatch_size=4)
    assert exchangeable(problem) == ((1, 2), (2, 3))
    every, some = list(convex_partitions(graph)), list(convex_partitions(graph, alike=((1, 2), (2, 3))))
    assert len(some) < len(every) and set(some) < set(every)
    sizes = {tuple(sorted((mask & 0b01110).bit_count() for mask in stages)) for stages in every}
    assert sizes == {tuple(sorted((mask & 0b01110).bit_count() for mask in stages)) for stages in some}


@pytest.mark.parametrize("seed", range(20))
def test_bounds_only_skip_what_cannot_win(seed):
    """The same optimum as by simulating everything."""
    problem = random_problem(seed, max_ops=5, max_devices=3)
    strategy = Strategy(name="test", planner=Exhaustive(), schedule=OneFOneB())
    best = float("inf")
    for masks in convex_partitions(problem.graph):
        for counts in itertools.product(range(1, 4), repeat=len(masks)):
            for b in problem.microbatch_sizes():
                if sum(counts) <= problem.cluster.num_devices and all(b % r == 0 for r in counts):
                    with contextlib.suppress(InvalidPlan, Infeasible):
                        plan = make_plan(problem, "x", list(zip(masks, counts, strict=True)), b)
                        plan.validate(problem)
                        best = min(best, strategy.predict(plan, problem, record=False).metrics.iteration_s)
    found = run(Exhaustive(), problem)
    assert found is None or found[1] <= best * (1 + 1e-9)
    assert best == float("inf") or found[1] >= 0.7 * best  # Chains may be better; hardly so.


def test_unequal_micro_batches_win_where_a_small_one_suits_one_stage_only():
    """Somewhere among small problems they do, and the plan says so; they are never worse."""
    wins = 0
    for seed in range(12):
        problem = random_problem(seed, max_ops=4, max_devices=3)
        uniform, free = run(Exhaustive(), problem), run(Exhaustive(per_stage_microbatch=True), problem)
        assert uniform is None or free[1] <= uniform[1] * (1 + 1e-9)
        if uniform and free and free[1] < uniform[1] * (1 - 1e-6):
            wins += 1
            assert len({stage.microbatch_size for stage in free[0].stages}) > 1
    assert wins


def test_limits():
    with pytest.raises(InvalidConfig, match=r"graph\.max_ops"):
        run(Exhaustive(), Problem(graph=chain(10), cluster=cluster(2), cost=Constant(), minibatch_size=2))
    with pytest.raises(InvalidConfig, match="num_devices"):
        run(Exhaustive(), Problem(graph=chain(8), cluster=cluster(7), cost=Constant(), minibatch_size=2))
    with pytest.raises(InvalidConfig, match="space"):
        Exhaustive(space="all")
    with pytest.raises(Infeasible):
        Exhaustive().plan(Problem(graph=chain(2), cluster=cluster(2, 0.5), cost=Constant(), minibatch_size=2), lambda plan: None)
