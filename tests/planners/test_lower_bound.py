"""The certificate holds: against every plan that any planner finds, and against the optimum of small problems."""

from __future__ import annotations

import statistics
from dataclasses import replace

import pytest

from gpp.cost.models.constant import Constant
from gpp.cost.problem import Problem
from gpp.cost.regime import Regime
from gpp.errors import Infeasible
from gpp.graph.op_graph import Op, OpGraph, Tensor
from gpp.graph.random_graphs import random_dag
from gpp.planners.bounds.lower_bound import Bound, lower_bound
from gpp.planners.chains.even import Even
from gpp.planners.chains.sequential import Sequential
from gpp.planners.graphpipe.graphpipe import GraphPipe
from gpp.schedules.gpipe import GPipe
from gpp.serialization import from_json, to_json
from gpp.strategy import Strategy
from tests.oracle.exhaustive import Exhaustive
from tests.support.graphs import chain
from tests.support.operations import calls
from tests.support.problems import Rate, cluster, random_problem, run, uneven


def check(problem: Problem, planners: tuple) -> list[float]:
    """Gaps of the plans found; every one must be above the bound."""
    try:
        bound = lower_bound(problem)
    except Infeasible:
        bound = None
    gaps = []
    for planner in planners:
        found = run(planner, problem)
        if found is not None:
            assert bound is not None, f"{planner} found a plan of a problem without any"
            assert bound.iteration_s <= found[1] * (1 + 1e-9), f"{planner}: {found[1]} beats {bound}"
            gaps.append(bound.gap(found[1]))
    return gaps


@pytest.mark.parametrize("block", range(10))
def test_below_the_optimum_of_small_problems(block):
    """250 problems: series-parallel and not, tight memory, equal and unequal devices; and it is no empty promise."""
    gaps = []
    for seed in range(25 * block, 25 * block + 25):
        problem = random_problem(seed, max_ops=7, max_devices=5)
        gaps += check(uneven(problem, seed) if seed % 4 == 0 else problem, (Exhaustive(),))
    assert len(gaps) > 10
    assert statistics.median(gaps) < 0.35


def test_below_every_plan_of_larger_problems():
    """A sample; `tests.check_planners --what validate` tries thousands."""
    planners = (GraphPipe(max_candidates=0), Sequential(), Sequential(replication=False))
    gaps = []
    for seed in range(1000, 1006):
        problem = random_problem(seed, max_ops=24, max_devices=8)
        gaps += check(uneven(problem, seed) if seed % 3 == 0 else problem, planners)[:1]
        if problem.cluster.num_devices <= problem.graph.num_ops:
            check(problem, (Even(),))
    assert statistics.median(gaps) < 1.0


@pytest.mark.parametrize("seed", range(10))
def test_holds_for_gpipe(seed):
    """A schedule that keeps the whole mini-batch."""
    problem = replace(random_problem(seed, max_ops=10, max_devices=5), regime=Regime(in_flight="all"))
    strategy = Strategy(name="test", planner=Sequential(), schedule=GPipe())
    try:
        plan = strategy.plan(problem)
    except Infeasible:
        return
    assert lower_bound(problem).iteration_s <= strategy.predict(plan, problem).metrics.iteration_s


def test_exact_where_the_argument_is():
    """One operator on one device; equal operators without a bubble; a chain with one micro-batch."""
    alone = Problem(graph=chain(1), cluster=cluster(1), cost=Constant(), minibatch_size=8, microbatch_size=2)
    assert lower_bound(alone).iteration_s == pytest.approx(run(Exhaustive(), alone)[1], rel=1e-8)
    ops = tuple(Op(name=f"o{i}", forward_flops=1.0, backward_flops=2.0) for i in range(4))
    free = Problem(graph=OpGraph(name="free", ops=ops, tensors=()), cluster=cluster(4), cost=Constant(), minibatch_size=8)
    assert lower_bound(free).iteration_s == pytest.approx(24.0, rel=1e-8)
    line = Problem(graph=chain(4), cluster=cluster(4), cost=Constant(), minibatch_size=1)
    assert lower_bound(line).iteration_s == pytest.approx(run(Exhaustive(), line)[1], rel=3e-3)


def test_packing_counts():
    """Three equal operators on two devices: one device has two of them."""
    ops = tuple(Op(name=f"o{i}", forward_flops=1.0, backward_flops=2.0) for i in range(3))
    problem = Problem(
        graph=OpGraph(name="free", ops=ops, tensors=()), cluster=cluster(2), cost=Constant(), minibatch_size=1, max_replicas=1
    )
    bound = lower_bound(problem)
    assert bound.iteration_s == pytest.approx(6.0, rel=3e-3)
    assert bound.terms["work"] == pytest.approx(4.5)
    assert "packed" in bound.binding


def test_gradients_do_not_return_where_none_flow():
    """Without gradients between them, the first operator runs ahead: no period waits for it."""
    ops = tuple(Op(name=f"o{i}", forward_flops=1.0, backward_flops=5.0) for i in range(2))
    tensors = (Tensor(name="t", producer=0, consumers=(1,), bytes_per_sample=0.0, differentiable=False),)
    problem = Problem(graph=OpGraph(name="g", ops=ops, tensors=tensors), cluster=cluster(2), cost=Constant(), minibatch_size=1)
    assert lower_bound(problem).iteration_s == pytest.approx(6.0, rel=3e-3)
    assert run(Exhaustive(), problem)[1] == pytest.approx(6.0)


def test_infeasible_is_certified():
    small = cluster(2, 0.5)
    with pytest.raises(Infeasible, match="alone"):
        lower_bound(Problem(graph=chain(2), cluster=small, cost=Constant(), minibatch_size=2))


def test_is_a_value_that_reads_back():
    bound = lower_bound(random_problem(3, max_ops=8, max_devices=4))
    assert from_json(Bound, to_json(bound)) == bound
    assert "from optimal" in bound.text(2 * bound.iteration_s)
    assert bound.gap(1.5 * bound.iteration_s) == pytest.approx(0.5)


def test_work_grows_with_the_operators():
    for num_ops, devices, minibatch in ((256, 32, 512), (1000, 1024, 16384)):
        problem = Problem(
            graph=random_dag(num_ops, 1),
            cluster=cluster(devices),
            cost=Rate(),
            minibatch_size=minibatch,
            optimizer_state_factor=2.0,
        )
        # 100 an operator as this is written.
        assert calls(lambda problem=problem: lower_bound(problem)) < 300 * num_ops
