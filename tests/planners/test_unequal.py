"""Clusters of unequal speed and memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpp import Even, GraphPipe, OneFOneB, Sequential, Strategy
from gpp.cluster import Cluster, Link, PairLink
from gpp.cost.models.constant import Constant
from gpp.cost.problem import Problem
from gpp.cost.regime import Regime
from gpp.graph.forward_only import forward_only
from gpp.mechanisms.serving.course import Requests
from gpp.planners.bounds.lower_bound import lower_bound
from gpp.planners.common.average import average
from gpp.planners.common.candidates import Assessor, Candidate
from gpp.planners.common.heterogeneous_chain import HeterogeneousChain
from gpp.planners.common.linear_orders import intervals
from gpp.planners.common.placement import Placer
from gpp.planners.common.stage_costs import StageCosts
from tests.oracle.all_placements import optimum_s
from tests.support.graphs import chain
from tests.support.long import thinned
from tests.support.mixed import linked, mixed_problem
from tests.support.problems import cluster, run, towers


def with_devices(base, *changes):
    """A cluster whose devices differ from the base's as the keyword arguments say."""
    return replace(base, devices=tuple(replace(d, **change) for d, change in zip(base.devices, changes, strict=True)))


FAST, SLOW = {"speed_factor": 1.0}, {"speed_factor": 0.25}


@pytest.mark.parametrize(("seed", "own"), thinned([(seed, own) for seed in range(5) for own in (False, True)], 3))
def test_small_problems_equal_everything_on_all_devices(seed, own):
    """`python -m tests.checks.planners --what placements` asks more of them."""
    problem = mixed_problem(seed, ops=(3, 5), devices=(2, 4))
    problem = linked(problem, seed) if own else problem
    best, found = optimum_s(problem), run(GraphPipe(colocate="never"), problem)
    assert (best is None) == (found is None)
    if best:
        assert found[1] <= best * (1 + 1e-6)
        assert lower_bound(problem).iteration_s <= best * (1 + 1e-9)


@pytest.mark.parametrize("seed", thinned([3, 9]))
def test_larger_problems_have_valid_plans_and_chains_are_no_better(seed):
    """`python -m tests.checks.planners --what unequal` asks more of them."""
    problem = mixed_problem(seed)
    problem = linked(problem, seed) if seed == 9 else problem
    ours, chains, even = (run(planner, problem) for planner in (GraphPipe(colocate="never"), Sequential(), Even()))
    for other in (chains, even):
        assert other is None or (ours is not None and ours[1] <= other[1] * (1 + 1e-9))


def test_stages_are_as_long_as_their_devices_are_fast():
    """A chain of ten equal operators on speeds 1, 1, 1/4, 1/4: four operators for each fast device, one for each slow one."""
    problem = Problem(graph=chain(10), cluster=with_devices(cluster(4), FAST, SLOW, SLOW, FAST), cost=Constant(), minibatch_size=64)
    plan, _ = run(GraphPipe(colocate="never", replication=False), replace(problem, microbatch_size=1))
    speed = problem.cluster.devices
    assert sorted((len(s.ops), speed[s.devices[0]].speed_factor) for s in plan.stages) == [(1, 0.25), (1, 0.25), (4, 1.0), (4, 1.0)]


def test_stages_that_need_memory_get_large_devices():
    graph = chain(4, saved=1.0)
    graph = replace(graph, ops=(*graph.ops[:1], replace(graph.ops[1], saved_bytes=20.0), *graph.ops[2:]))
    small, large = {"memory_bytes": 12.0}, {"memory_bytes": 100.0}
    problem = Problem(graph=graph, cluster=with_devices(cluster(4), small, small, small, large), cost=Constant(), minibatch_size=16)
    plan, _ = run(GraphPipe(colocate="never"), problem)
    assert next(stage for stage in plan.stages if 1 in stage.ops).devices == (3,)


def test_replicas_are_equal_devices():
    """Alternating devices of one node: a stage's replicas are of one speed, since the slowest decides."""
    devices = with_devices(cluster(4), FAST, SLOW, FAST, SLOW)
    graph = towers(2, 1)
    graph = replace(graph, ops=(replace(graph.ops[0], forward_flops=8.0, backward_flops=16.0), *graph.ops[1:]))
    problem = Problem(graph=graph, cluster=devices, cost=Constant(), minibatch_size=32)
    plan, _ = run(GraphPipe(colocate="never"), problem)
    assert next(stage for stage in plan.stages if 0 in stage.ops).devices == (0, 2)


def test_average_devices_get_as_much_done():
    problem = mixed_problem(3)
    times = [problem.op_times(4, d).forward_s for d in range(problem.cluster.num_devices)]
    for view in average(problem):
        assert view.cluster.homogeneous
        assert len(times) / view.op_times(4, 0).forward_s == pytest.approx(sum(1 / t for t in times))


WITHOUT_REPLICAS = (GraphPipe(colocate="never", replication=False), Sequential(replication=False))
CHAIN = ((0b001, 1), (0b010, 1), (0b100, 1))


def chain_with_messages(first: float, second: float, cluster: Cluster) -> Problem:
    """Three equal operators and two messages of so many bytes per sample."""
    graph = chain(3)
    tensors = tuple(replace(t, bytes_per_sample=size) for t, size in zip(graph.tensors, (first, second), strict=True))
    return Problem(graph=replace(graph, tensors=tensors), cluster=cluster, cost=Constant(), minibatch_size=16)


def test_neighbours_get_the_fast_link():
    """Of three equal devices the two with the slow link between them do not stand side by side: placed so, and found so."""
    slow = PairLink(between=(0, 1), link=Link(latency_s=0.0, bandwidth_bytes_per_s=1e5))
    base = cluster(3, link=Link(latency_s=0.0, bandwidth_bytes_per_s=1e9))
    problem = chain_with_messages(1e6, 1e6, replace(base, links=(slow,)))
    placed = Assessor(StageCosts(problem)).assess(CHAIN, 1)
    assert isinstance(placed, Candidate) and placed.placement[1] == (2,)
    for planner in WITHOUT_REPLICAS:
        plan, _ = run(planner, problem)
        assert plan.stages[1].devices == (2,) and len(plan.stages) == 3


def test_a_stage_with_much_to_send_gets_the_device_with_the_fast_link():
    """The end of the chain has little to receive, so the device with the slow link of its own is for it."""
    base = cluster(3, link=Link(latency_s=0.0, bandwidth_bytes_per_s=1e9))
    problem = chain_with_messages(1e7, 1.0, with_devices(base, {"bandwidth_bytes_per_s": 1e6}, {}, {"name": "another"}))
    placed = Assessor(StageCosts(problem)).assess(CHAIN, 1)
    assert isinstance(placed, Candidate) and placed.placement[2] == (0,)
    for planner in WITHOUT_REPLICAS:
        plan, _ = run(planner, problem)
        assert [stage.devices for stage in plan.stages if 2 in stage.ops] == [(0,)] and len(plan.stages) == 3


def test_a_stage_takes_as_long_as_its_messages_where_these_are_slower():
    """A fast device with a slow link of its own takes a quarter of the seconds to compute, and one to send 1e5 bytes."""
    base = cluster(2, link=Link(latency_s=0.0, bandwidth_bytes_per_s=1e9))
    devices = with_devices(base, {"speed_factor": 4.0, "bandwidth_bytes_per_s": 1e5}, {})
    assessor = Assessor(StageCosts(chain_with_messages(1.0, 1e5, devices)))
    assert assessor.seconds_by_type(0b001, 1, 1) == [0.75, 3.0]
    assert assessor.seconds_by_type(0b100, 1, 1) == pytest.approx([1.0, 3.0])


@pytest.mark.parametrize(
    ("objective", "seconds", "speeds", "ours", "chains"),
    [
        # The long tower on the fast device, the short one at the same time on a slow one, the join behind them on another; a
        # chain has one tower after the other.
        ("latency", (2.0, 2.0, 6.0, 6.0), (1.0, 1 / 3, 1 / 3), 12.0, 16.0),
        # Both ends on the slow device: 4 of 12 seconds at half the speed. An interval of either order has 3 at most.
        ("throughput", (3.0, 3.0, 5.0, 1.0), (2.0, 1.0), 4.0, 4.5),
    ],
)
def test_two_unequal_towers_serve_requests_faster_than_a_chain(objective, seconds, speeds, ours, chains):
    graph = towers(2, 2)
    took = [*seconds, 0.0]
    ops = tuple(replace(op, forward_flops=flops) for op, flops in zip(graph.ops, took, strict=True))
    devices = with_devices(cluster(len(speeds)), *({"speed_factor": speed} for speed in speeds))
    problem = Problem(
        graph=forward_only(replace(graph, ops=ops)),
        cluster=devices,
        cost=Constant(),
        minibatch_size=1,
        regime=Regime(course=Requests(buffers=2)),
    )
    for planner, expected in ((GraphPipe(colocate="never"), ours), (Sequential(), chains)):
        strategy = Strategy(name="test", planner=planner, schedule=OneFOneB(), objective=objective)
        plan = strategy.plan(problem)
        assert strategy.predict(plan, problem, record=False).metrics.iteration_s == pytest.approx(expected, rel=0.01)


def test_lines_are_laid_out_by_device_type():
    """The limit is the least: ten operators on speeds 1 and 1/4 take as long as eight on the first."""
    problem = Problem(graph=chain(10), cluster=with_devices(cluster(2), FAST, SLOW), cost=Constant(), minibatch_size=64)
    costs, placer = StageCosts(average(problem)[0]), Placer(problem.cluster)
    layouts = HeterogeneousChain(costs, problem, placer, intervals(costs, tuple(range(10))), range(11)).layouts()
    least = min(layouts)
    sizes = {
        mask.bit_count(): placer.cluster.devices[placer.types[types[0]]].speed_factor
        for (mask, _), types in zip(*least[2:], strict=True)
    }
    assert sizes == {8: 1.0, 2: 0.25}
