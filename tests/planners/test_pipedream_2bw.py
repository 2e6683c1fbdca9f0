from __future__ import annotations

import re
from dataclasses import replace
from itertools import combinations, pairwise

import pytest

from gpp import DoubleBuffer, Link, NoFlush, OneFOneB, PipeDream2BW, Plan, Strategy
from gpp.cost.models.constant import Constant
from gpp.cost.problem import Problem
from gpp.errors import Infeasible, InvalidConfig
from gpp.mechanisms.marks.stage import marks_of
from gpp.planners.common.linear_orders import branch_first_order, depth_first_order
from tests.support.graphs import chain, two_towers, with_weights
from tests.support.long import thinned
from tests.support.operations import calls
from tests.support.problems import cluster, random_problem, uneven

EVERY = PipeDream2BW(max_candidates=100_000)


def asynchronous(planner: PipeDream2BW | None = None) -> Strategy:
    return Strategy(name="2bw", planner=planner or PipeDream2BW(), schedule=NoFlush(), weights=DoubleBuffer())


def synchronous(planner: PipeDream2BW | None = None) -> Strategy:
    return Strategy(name="flush", planner=planner or PipeDream2BW(), schedule=OneFOneB())


def of_blocks(
    count: int,
    devices: int,
    minibatch: int,
    memory: float = 1e15,
    link: Link | None = None,
    param_bytes: int = 0,
    saved: float = 1.0,
) -> Problem:
    """A chain of equal blocks, each with its weights."""
    graph = with_weights(chain(count, saved=saved), param_bytes)
    on = cluster(devices, memory, link) if link else cluster(devices, memory)
    return Problem(graph=graph, cluster=on, cost=Constant(), minibatch_size=minibatch)


def shape(plan: Plan) -> tuple[int, int, int]:
    """Depth, width and micro-batch; checks that they are the same at all stages."""
    widths, sizes = {len(s.devices) for s in plan.stages}, {s.microbatch_size for s in plan.stages}
    assert len(widths) == len(sizes) == 1 and plan.depth == len(plan.stages)
    return plan.depth, widths.pop(), sizes.pop()


def test_equal_blocks_are_dealt_out_equally() -> None:
    """Weights that only a pipeline holds: 8 blocks on 4 devices, and no width that fits."""
    problem = of_blocks(8, 4, 16, memory=400.0, param_bytes=50)
    plan = asynchronous().plan(problem)
    assert [len(stage.ops) for stage in plan.stages] == [2, 2, 2, 2]
    assert asynchronous().predict(plan, problem).metrics.iteration_s == pytest.approx(16 * 2 * 3)
    assert re.match(r"own objective: 96.0 s a mini-batch; depth 4, width 1, micro-batch 4 \(4 a mini-batch\)", plan.explanation[0])


@pytest.mark.parametrize("strategy", [asynchronous(), synchronous()], ids=lambda s: s.name)
@pytest.mark.parametrize("seed", thinned(range(30)))
def test_stages_are_equally_replicated_intervals_of_one_order(strategy: Strategy, seed: int) -> None:
    problem = random_problem(seed, max_ops=12, max_devices=8)
    problem = uneven(problem, seed) if seed % 4 == 0 else problem
    try:
        plan = strategy.plan(problem)
    except Infeasible:
        return
    strategy.check(plan, problem)
    depth, width, b = shape(plan)
    assert depth * width <= problem.cluster.num_devices and b % width == 0
    assert problem.minibatch_size // b >= strategy.weights.least_accumulation(depth)
    orders = [o(problem.graph) for o in (depth_first_order, branch_first_order)]
    assert any(order_of(plan, order) for order in orders)
    assert not any(marks_of(stage).recompute for stage in plan.stages)
    seconds = strategy.predict(plan, problem, record=False).metrics.iteration_s
    work = sum(problem.minibatch_size // b * sum(problem.stage_times(stage.ops, b, stage.devices)) * width for stage in plan.stages)
    assert seconds >= work / problem.cluster.num_devices * (1 - 1e-9)


def order_of(plan: Plan, order: tuple[int, ...]) -> bool:
    """Whether the stages follow each other in the order."""
    at, done = {op: i for i, op in enumerate(order)}, 0
    for stage in plan.stages:
        if sorted(at[op] for op in stage.ops) != list(range(done, done + len(stage.ops))):
            return False
        done += len(stage.ops)
    return True


@pytest.mark.parametrize("strategy", [asynchronous(EVERY), synchronous(EVERY)], ids=lambda s: s.name)
@pytest.mark.parametrize("seed", thinned(range(12)))
def test_finds_what_listing_every_cut_finds(strategy: Strategy, seed: int) -> None:
    """Own objective of the chosen shape: the least over all cuts that fit, by `Plan.validate` and the formula written out."""
    problem = random_problem(seed, max_ops=7, max_devices=6)
    try:
        plan = strategy.plan(problem)
    except Infeasible:
        assert not any(True for _ in every_plan(strategy, problem))
        return
    assert plan.objective is not None
    value = plan.objective.value_s
    same = [objective_s(other, problem, strategy) for other in every_plan(strategy, problem) if shape(other) == shape(plan)]
    assert value == pytest.approx(min(same), rel=1e-9)
    assert value == pytest.approx(objective_s(plan, problem, strategy), rel=1e-9)
    # All shapes were predicted: where there is nothing to cut, that is all there is.
    seconds = strategy.predict(plan, problem, record=False).metrics.iteration_s
    whole = [other for other in every_plan(strategy, problem) if other.depth == 1]
    assert all(seconds <= strategy.predict(other, problem, record=False).metrics.iteration_s * (1 + 1e-9) for other in whole)


def every_plan(strategy: Strategy, problem: Problem):
    """Every shape with every cut of both orders, as far as they are valid."""
    from gpp.plan.build import make_plan
    from gpp.planners.common.placement import Placer

    n, devices = problem.graph.num_ops, problem.cluster.num_devices
    for order in {depth_first_order(problem.graph), branch_first_order(problem.graph)}:
        for depth in range(1, min(n, devices) + 1):
            for width in range(1, devices // depth + 1):
                for b in strategy.posed(problem).microbatch_sizes(depth):
                    for inner in combinations(range(1, n), depth - 1):
                        cuts = [0, *inner, n]
                        parts = [(sum(1 << op for op in order[i:j]), width) for i, j in pairwise(cuts)]
                        if b % width:
                            continue
                        placement = Placer(problem.cluster).equal((width,) * depth)
                        # As many samples are in flight as the pipeline is deep, also beyond one mini-batch if it does not drain.
                        long = replace(problem, minibatch_size=problem.minibatch_size * (1 if strategy.schedule.drains else 64))
                        plan = make_plan(long, "x", parts, b, chain=True, ordered=True, placement=placement)
                        plan = replace(plan, minibatch_size=problem.minibatch_size)
                        try:
                            strategy.check(plan, problem)
                        except (Infeasible, InvalidConfig):
                            continue
                        yield plan


def objective_s(plan: Plan, problem: Problem, strategy: Strategy) -> float:
    depth, width, b = shape(plan)
    cluster, m, slowest = problem.cluster, problem.minibatch_size // b, 0.0
    used = [d for stage in plan.stages for d in stage.devices]
    link = cluster.intra_node if len({cluster.nodes[d] for d in used}) == 1 else cluster.inter_node
    for stage in plan.stages:
        own = set(stage.ops)
        entering = sum(
            t.bytes_per_sample * (1 + t.differentiable)
            for t in problem.graph.tensors
            if t.producer not in own and own & set(t.consumers)
        )
        compute = sum(problem.stage_times(stage.ops, b, stage.devices)) + entering * (b // width) / link.bandwidth_bytes_per_s
        trainable = problem.trainable_bytes(stage.ops)
        reduce = max(cluster.allreduce_s(trainable, other.devices) for other in plan.stages)
        slowest = max(slowest, compute, reduce / m)
    return slowest * (m + depth - 1 if strategy.weights.flushes else m)


def test_as_many_microbatches_as_stages() -> None:
    """A mini-batch of 4 samples on 8 devices: 4 stages at most, where nothing is replicated and nothing drains."""
    problem = of_blocks(8, 8, 4)
    assert shape(asynchronous(PipeDream2BW(replication=False)).plan(problem)) == (4, 1, 1)
    assert synchronous(PipeDream2BW(replication=False)).plan(replace(problem, minibatch_size=16)).depth == 8
    # Without drains nothing is gained beyond; with them a deeper one may still be shorter.
    imposed = replace(problem, minibatch_size=16, microbatch_size=8)
    assert asynchronous(PipeDream2BW(replication=False)).plan(imposed).depth == 2


def test_two_versions_count() -> None:
    """Two blocks a stage: weights and gradients of 400 bytes, and 200 for a second version."""
    one = of_blocks(4, 2, 16, memory=450.0, param_bytes=100, saved=0.0)
    assert shape(synchronous().plan(one))[0] == 2
    with pytest.raises(Infeasible, match=r"lacks .* for the stage of op"):
        asynchronous().plan(one)
    two = of_blocks(4, 2, 16, memory=650.0, param_bytes=100, saved=0.0)
    held = asynchronous().predict(asynchronous().plan(two), two).metrics
    assert set(held.weight_versions.values()) == {2} and min(held.peak_memory_bytes.values()) >= 600


def test_a_cut_that_fits_is_found_where_the_even_one_does_not() -> None:
    """The first of two stages keeps twice the activations: it gets fewer blocks."""
    problem = of_blocks(6, 2, 16, memory=6.5, saved=1.0)
    loose = synchronous(PipeDream2BW(replication=False)).plan(of_blocks(6, 2, 16))
    tight = synchronous(PipeDream2BW(replication=False)).plan(problem)
    assert [len(stage.ops) for stage in loose.stages] == [3, 3]
    assert [len(stage.ops) for stage in tight.stages] == [2, 4]


def test_the_remedy_fits() -> None:
    """Without drains; with them: test_properties."""
    strategy = asynchronous()
    problem = of_blocks(6, 3, 9, memory=100.0, param_bytes=40, saved=30.0)
    with pytest.raises(Infeasible) as caught:
        strategy.plan(problem)
    enough = float(re.search(r"memory_bytes=([\d.e+]+)", caught.value.remedy)[1])  # pyright: ignore[reportOptionalSubscript]
    strategy.plan(replace(problem, cluster=cluster(3, enough * 1.001)))
    with pytest.raises(Infeasible):
        strategy.plan(replace(problem, cluster=cluster(3, enough * 0.98)))
    with pytest.raises(Infeasible) as caught:
        strategy.plan(replace(problem, cluster=cluster(3, enough * 1.001), microbatch_size=9))
    size = int(re.search(r"microbatch_size=(\d)", caught.value.remedy)[1])  # pyright: ignore[reportOptionalSubscript]
    assert 9 % size == 0
    strategy.plan(replace(problem, cluster=cluster(3, enough * 1.001), microbatch_size=size))


def test_an_all_reduce_that_is_slow_makes_the_pipeline_deep() -> None:
    slow = Link(latency_s=0.0, bandwidth_bytes_per_s=100.0)
    assert shape(asynchronous().plan(of_blocks(8, 4, 32, link=slow, param_bytes=1000)))[:2] == (4, 1)
    assert shape(asynchronous().plan(of_blocks(7, 4, 32, link=slow, param_bytes=0)))[:2] == (1, 4)


def test_graphs_with_branches_become_chains() -> None:
    problem = Problem(graph=two_towers(4), cluster=cluster(3), cost=Constant(), minibatch_size=24)
    plan = asynchronous(PipeDream2BW(replication=False)).plan(problem)
    assert plan.depth == 3 and [len(stage.ops) for stage in plan.stages] == [3, 3, 3]


def test_planning_takes_few_calls() -> None:
    """48 blocks on 32 devices, as published: a quarter of a second."""
    problem = of_blocks(48, 32, 512, param_bytes=100)
    # 215 000 as this is written.
    assert calls(lambda: asynchronous().plan(problem)) < 800_000
