"""The certificate holds: against every plan that any planner finds, and against the optimum of small problems."""

from __future__ import annotations

import random
import statistics
from dataclasses import replace

import pytest

from gpp import Even, GPipe, GraphPipe, Link, OneFOneB, Sequential, Strategy
from gpp.cost.holding import EVERYTHING
from gpp.cost.models.constant import Constant
from gpp.cost.problem import Problem
from gpp.cost.regime import Regime
from gpp.errors import Infeasible
from gpp.graph.op_graph import Op, OpGraph, Tensor, bits, mask_of
from gpp.graph.random_graphs import random_dag, random_series_parallel
from gpp.planners.bounds.lower_bound import Bound, lower_bound
from gpp.serialization import from_json, to_json
from tests.oracle.exhaustive import Exhaustive
from tests.support.graphs import chain, with_weights
from tests.support.long import thinned
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


@pytest.mark.parametrize("block", thinned(range(5), 5))
def test_below_the_optimum_of_small_problems(block):
    """250 problems: series-parallel and not, tight memory, equal and unequal devices; and it is no empty promise."""
    gaps = []
    for seed in range(25 * block, 25 * block + 25):
        problem = random_problem(seed, max_ops=7, max_devices=5)
        gaps += check(uneven(problem, seed) if seed % 4 == 0 else problem, (Exhaustive(),))
    assert len(gaps) > 10
    assert statistics.median(gaps) < 0.35


def test_below_every_plan_of_larger_problems():
    """A sample; `tests.checks.planners --what validate` tries thousands."""
    planners = (GraphPipe(colocate="never"), Sequential(), Sequential(replication=False))
    gaps = []
    for seed in range(1000, 1002):
        problem = random_problem(seed, max_ops=24, max_devices=8)
        gaps += check(uneven(problem, seed) if seed % 3 == 0 else problem, planners)[:1]
        if problem.cluster.num_devices <= problem.graph.num_ops:
            check(problem, (Even(),))
    assert statistics.median(gaps) < 1.0


@pytest.mark.parametrize("first", thinned((0, 8)))
def test_holds_for_losses_on_whole_mini_batches(first):
    """Whatever the planner, the loss has a stage of its own, most often on a device of another one."""
    planners = (Exhaustive(), GraphPipe(), Sequential(), Sequential(replication=False))
    gaps, shared, alone = [], 0, 0
    for seed in range(first, first + 8):
        free = random_problem(seed, max_ops=6, max_devices=3)
        free = free if seed % 3 == 0 else free.with_endless_memory
        first = mask_of(range(free.graph.num_ops - 1 - seed % 2, free.graph.num_ops))
        apart = mask_of(op for i in bits(first) for op in (i, *bits(free.graph.descendants[i])))
        size = free.microbatch_sizes()[0] if seed % 2 else None
        problem = replace(uneven(free, seed) if seed % 4 == 0 else free, minibatch_ops=apart, microbatch_size=size)
        for planner, schedule in [(one, OneFOneB()) for one in planners] + [(Sequential(), GPipe())]:
            strategy = Strategy(name="test", planner=planner, schedule=schedule)
            try:
                plan = strategy.plan(problem)
            except Infeasible:
                continue
            seconds, bound = strategy.predict(plan, problem).metrics.iteration_s, lower_bound(problem).of(plan)
            assert bound is not None and bound.iteration_s <= seconds * (1 + 1e-9), (seed, planner, seconds, bound)
            gaps.append(bound.gap(seconds))
            shared, alone = shared + plan.shares_devices, alone + (not plan.shares_devices)
    assert shared > 10 and alone and statistics.median(gaps) < 0.35, (shared, alone, statistics.median(gaps))


@pytest.mark.parametrize("seed", thinned(range(6), 3))
def test_holds_for_gpipe(seed):
    """A schedule that keeps the whole mini-batch."""
    problem = replace(random_problem(seed, max_ops=10, max_devices=5), regime=Regime(holds=EVERYTHING))
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


@pytest.mark.parametrize("seed", thinned(range(8)))
def test_below_the_optimum_where_links_are_slow(seed):
    """Every stage with a micro-batch size of its own: messages, channels and memory bind."""
    rng = random.Random(f"slow {seed}")
    make = random_dag if rng.random() < 0.5 else random_series_parallel
    link = Link(latency_s=rng.choice([0.0, 1e-3]), bandwidth_bytes_per_s=10 ** rng.uniform(6, 8.5))
    problem = Problem(
        graph=make(rng.randint(2, 4), seed, skew=rng.choice([0.0, 1.0])),
        cost=Rate(fixed_s=rng.choice([0.0, 2e-4])),
        minibatch_size=rng.choice([4, 6, 8, 9]),
        optimizer_state_factor=rng.choice([0.0, 2.0]),
        cluster=cluster(rng.randint(2, 3), 10 ** rng.uniform(6.9, 7.6), link),
    )
    check(problem, (Exhaustive(per_stage_microbatch=True), GraphPipe(colocate="never"), Sequential()))


def test_a_cut_that_memory_forces_costs_its_messages():
    """Two operators that no device holds together; their tensor takes longer than they do, forwards and backwards."""
    two = with_weights(chain(2, saved=0.0), 60_000)
    two = replace(two, tensors=tuple(replace(tensor, bytes_per_sample=1000.0) for tensor in two.tensors))
    slow = Link(latency_s=0.5, bandwidth_bytes_per_s=100.0)
    problem = Problem(graph=two, cluster=cluster(2, 200_000.0, slow), cost=Constant(), minibatch_size=8, microbatch_size=1)
    bound, best = lower_bound(problem), run(Exhaustive(), problem)[1]
    # The channel has 8 messages of 1,000 bytes in a step: 10 s each, and their latency.
    assert 80.0 * 0.98 <= bound.iteration_s <= best
    assert "cut" in bound.binding
    fast = replace(problem, cluster=cluster(2, 200_000.0, Link(latency_s=0.0, bandwidth_bytes_per_s=1e9)))
    assert lower_bound(fast).iteration_s < 40.0


def test_a_detour_is_cut_with_the_path():
    """Two operators to a device: the middle cut has a small tensor on the path and a large one that skips two operators."""
    line = with_weights(chain(4), 400_000)
    beside = Tensor(name="beside", producer=0, consumers=(3,), bytes_per_sample=80_000.0)
    problem = Problem(
        graph=replace(line, tensors=(*line.tensors, beside)),
        cluster=cluster(2, 1.9e6, Link(latency_s=0.0, bandwidth_bytes_per_s=1e4)),
        cost=Constant(),
        minibatch_size=8,
        microbatch_size=1,
    )
    best = run(Exhaustive(), problem)[1]
    # 8 messages of 80,000 bytes on one channel.
    assert 64.0 * 0.98 <= lower_bound(problem).iteration_s <= best
    assert lower_bound(replace(problem, graph=line)).iteration_s < 64.0


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
    said = replace(bound, iteration_s=0.0123789).text(0.0246)
    assert said.startswith("at most 98.8 % from optimal: no plan takes less than 12.3 ms")  # 98.72, 12.3789
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
