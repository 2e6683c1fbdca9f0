"""Micro-batch sizes and k of kFkB by stage, or one planner's size for the cut of another."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpp import GraphPipe, OneFOneB, SameMicrobatch, Sequential, Strategy
from gpp.cost.models.constant import Constant
from gpp.cost.problem import Problem
from gpp.plan.build import make_plan
from gpp.planners.common.candidates import Assessor
from gpp.planners.common.incumbent import Incumbent
from gpp.planners.common.stage_costs import StageCosts
from gpp.planners.graphpipe.vary import MOST_SIMULATIONS, PerStage
from tests.oracle.exhaustive import Exhaustive
from tests.support.long import thinned
from tests.support.problems import Rate, cluster, random_problem, run, towers


def figure_5(memory_samples: float) -> Problem:
    """A chain of three operators; the first keeps a byte a sample, and every pass has a fixed cost."""
    graph = towers(1, 2)
    weights = (0.5, 0.5, 1.0)
    ops = tuple(
        replace(op, forward_flops=w, backward_flops=2 * w, saved_bytes=1.0 if i == 0 else 0.01, params=())
        for i, (op, w) in enumerate(zip(graph.ops, weights, strict=True))
    )
    return Problem(
        graph=replace(graph, ops=ops, params=()),
        cluster=cluster(3, memory_samples),
        cost=Constant(fixed_s=4.0),
        minibatch_size=64,
    )


def test_small_micro_batches_where_memory_binds_and_large_ones_where_kernels_are_slow():
    """Room for ten samples: uniform micro-batches of 4 would keep 12 at the first of three stages; 2, 2, 4 keep 10."""
    uniform, own = (
        run(GraphPipe(colocate="never", replication=False), figure_5(10.5)),
        run(GraphPipe(colocate="never", replication=False, per_stage=True), figure_5(10.5)),
    )
    assert [(s.microbatch_size, s.in_flight) for s in own[0].stages] == [(2, 10), (2, 8), (4, 4)]
    assert own[1] < 0.85 * uniform[1]
    assert "micro-batch 2, 4 by stage" in own[0].explanation
    # With room for 12 there is nothing to gain.
    roomy = [run(GraphPipe(colocate="never", replication=False, per_stage=each), figure_5(12.5))[1] for each in (False, True)]
    assert roomy[0] == roomy[1] < own[1]


@pytest.mark.parametrize("first", thinned((0, 12)))
def test_equals_the_oracle_of_unequal_micro_batches(first):
    equal = count = 0
    for seed in range(first, first + 12):
        problem = random_problem(seed, max_ops=4, max_devices=3)
        best, ours = run(Exhaustive(per_stage_microbatch=True), problem), run(GraphPipe(colocate="never", per_stage=True), problem)
        assert (best is None) == (ours is None)
        if best:
            count += 1
            equal += ours[1] <= best[1] * (1 + 1e-6)
    assert equal >= 0.8 * count > 0


@pytest.mark.parametrize("seed", thinned(range(10), 3))
def test_never_slower_than_uniform_and_bounded_in_simulations(seed):
    problem = random_problem(seed, max_ops=14, max_devices=6)
    uniform, own = run(GraphPipe(colocate="never"), problem), run(GraphPipe(colocate="never", per_stage=True), problem)
    assert (uniform is None) == (own is None)
    if uniform:
        assert own[1] <= uniform[1] * (1 + 1e-9)
        done = [int(plan.explanation[0].split("best of ")[1].split()[0]) for plan, _ in (uniform, own)]
        assert done[1] <= done[0] + MOST_SIMULATIONS + 1


@pytest.mark.parametrize("seed", thinned(range(15), 3))
def test_bound_is_below_the_prediction_of_unequal_micro_batches(seed):
    problem = random_problem(seed, max_ops=6, max_devices=4)
    strategy = Strategy(name="test", planner=GraphPipe(colocate="never"), schedule=OneFOneB())
    found = run(GraphPipe(colocate="never"), problem)
    if found is None:
        return
    stages = found[0].stages
    parts = [(sum(1 << op for op in stage.ops), 1) for stage in stages]
    incumbent = Incumbent(Assessor(StageCosts(problem)), "test", lambda plan: strategy.predict(plan, problem, record=False))
    hill = PerStage(incumbent)
    for shift in range(3):
        sizes = [problem.microbatch_sizes()[(s + shift) % 3] for s in range(len(parts))]
        for ks in ([1] * len(parts), [max(sizes) // b for b in sizes]):
            plan = make_plan(problem, "x", parts, sizes, k=ks, ordered=True)
            assert hill.bound_s(plan) <= strategy.predict(plan, problem).metrics.iteration_s * (1 + 1e-9)


@pytest.mark.parametrize("devices", [4, 6])
def test_the_cut_is_one_planners_and_the_micro_batch_the_others(devices: int) -> None:
    problem = Problem(graph=towers(2, 4), cluster=cluster(devices), cost=Rate(flop_per_s=3e3), minibatch_size=64)
    chain, chain_s = run(Sequential(replication=False), problem)
    _, full_s = run(GraphPipe(colocate="never", replication=False), problem)
    planner = SameMicrobatch(reference=Sequential(replication=False), planner=GraphPipe(colocate="never", replication=False))
    plan, seconds = run(planner, problem)
    assert {stage.microbatch_size for stage in plan.stages} == {chain.stages[0].microbatch_size}
    assert plan.depth < chain.depth and "Sequential" in plan.explanation[0]
    assert full_s <= seconds < chain_s
