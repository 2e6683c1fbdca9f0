from __future__ import annotations

import random
from dataclasses import replace

import pytest

from gpp import Even, GraphPipe, Link, Sequential
from gpp.cost.models.constant import Constant
from gpp.cost.problem import Problem
from gpp.graph.op_graph import Param
from gpp.planners.chains import sequential
from gpp.planners.common.candidates import Assessor, Candidate
from gpp.planners.common.linear_orders import depth_first_order, intervals
from gpp.planners.common.stage_costs import StageCosts
from tests.support.graphs import chain, diamond, two_towers, within
from tests.support.problems import cluster, random_problem, run, towers


def test_order_finishes_a_branch_before_the_next():
    graph = towers(3, 2, fork=True)
    assert depth_first_order(graph) == tuple(range(graph.num_ops))
    assert depth_first_order(diamond()) == (0, 1, 2, 3)
    assert depth_first_order(two_towers(3)) == tuple(range(7))


def test_closed_form_of_a_balanced_chain():
    """p equal stages, m micro-batches: (m + p - 1) (f + b), and the bubble (p - 1) / (m + p - 1)."""
    problem = Problem(graph=chain(4), cluster=cluster(4, 8.0), cost=Constant(), minibatch_size=8, microbatch_size=1)
    plan, seconds = run(Sequential(replication=False), problem)
    assert len(plan.stages) == plan.depth == 4
    assert seconds == pytest.approx((8 + 4 - 1) * 3)


def test_one_replicated_stage_has_no_bubble():
    problem = Problem(graph=chain(4), cluster=cluster(4), cost=Constant(), minibatch_size=8)
    plan, seconds = run(Sequential(), problem)
    assert len(plan.stages) == 1 and len(plan.stages[0].devices) == 4
    assert seconds == pytest.approx(8 * 4 * 3 / 4)


def test_memory_shapes_the_cut():
    """The first of three stages would hold three micro-batches of three operators: a shallower chain is left."""
    problem = Problem(graph=chain(9, saved=1.0), cluster=cluster(3), cost=Constant(), minibatch_size=16, microbatch_size=1)
    loose, _ = run(Sequential(replication=False), problem)
    tight, _ = run(Sequential(replication=False), replace(problem, cluster=cluster(3, 9.5)))
    assert [len(stage.ops) for stage in loose.stages] == [3, 3, 3]
    assert [len(stage.ops) for stage in tight.stages] == [4, 5]


def test_all_reduce_and_update_are_in_the_objective():
    """A large table is not replicated: its gradients would cross a slow link in every step."""
    graph = chain(3)
    table = Param(name="table", num_bytes=10**9)
    graph = replace(graph, ops=(replace(graph.ops[0], params=("table",)), *graph.ops[1:]), params=(table,))
    slow = Link(latency_s=0.0, bandwidth_bytes_per_s=1e7)
    problem = Problem(graph=graph, cluster=cluster(3, link=slow), cost=Constant(), minibatch_size=16)
    for planner in (Sequential(), GraphPipe(colocate="never")):
        plan, seconds = run(planner, problem)
        assert len(next(stage for stage in plan.stages if 0 in stage.ops).devices) == 1
        assert seconds < 16 * 9


@pytest.mark.parametrize("seed", range(30))
def test_never_slower_than_the_even_cut(seed):
    """The even cut is one of the chains that a hill is climbed from."""
    problem = random_problem(seed, max_ops=10, max_devices=5)
    if problem.cluster.num_devices > problem.graph.num_ops:
        return
    even, found = run(Even(), problem), run(Sequential(replication=False), problem)
    assert even is None or (found is not None and found[1] <= even[1] * (1 + 1e-9))


@pytest.mark.parametrize("seed", range(12))
def test_one_table_for_all_numbers_of_stages(seed, monkeypatch):
    """What large problems are searched with finds the same estimate where memory rules nothing out, and what fits where it does."""
    given, chosen = random_problem(seed, max_ops=9, max_devices=6), random.Random(seed)
    roomy = within(given, 1e15)
    for problem in (roomy, given):
        costs = StageCosts(problem)
        table, b = intervals(costs, depth_first_order(problem.graph)), chosen.choice(costs.microbatch_sizes)
        search = sequential._ChainSearch(costs, table, b)
        exact = search.solve(float("inf"))
        with monkeypatch.context() as patch:
            patch.setattr(sequential, "MOST_CELLS", 0)
            patch.setattr(sequential, "FAR", 1e9)
            large = search.solve(float("inf"))
        assert len(large) == (1 if exact else 0) or problem is not roomy
        for estimate, parts in large:
            assert isinstance(Assessor(costs).assess(parts, b, chain=True), Candidate)
            least = min(value for value, _ in exact)
            assert estimate == pytest.approx(least) if problem is roomy else estimate >= least * (1 - 1e-9)
