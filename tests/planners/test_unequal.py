"""Clusters of unequal speed and memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpp.cost.models.constant import Constant
from gpp.cost.problem import Problem
from gpp.planners.chains.even import Even
from gpp.planners.chains.sequential import Sequential
from gpp.planners.common.candidates import Assessor, Candidate
from gpp.planners.common.placement import Placer
from gpp.planners.common.stage_costs import StageCosts
from gpp.planners.graphpipe.complete import everywhere
from gpp.planners.graphpipe.graphpipe import GraphPipe
from gpp.planners.graphpipe.heterogeneous_chain import HeterogeneousChain
from gpp.planners.graphpipe.unequal import average
from tests.oracle.all_placements import optimum_s
from tests.support.graphs import chain
from tests.support.mixed import mixed_problem
from tests.support.problems import cluster, run, towers


def with_devices(base, *changes):
    """A cluster whose devices differ from the base's as the keyword arguments say."""
    return replace(base, devices=tuple(replace(d, **change) for d, change in zip(base.devices, changes, strict=True)))


FAST, SLOW = {"speed_factor": 1.0}, {"speed_factor": 0.25}


@pytest.mark.parametrize("seed", range(10))
def test_small_problems_equal_everything_on_all_devices(seed):
    problem = mixed_problem(seed, ops=(3, 5), devices=(2, 4))
    best, found, alone = (
        optimum_s(problem),
        run(GraphPipe(colocate="never"), problem),
        run(GraphPipe(colocate="never", max_candidates=0), problem),
    )
    assert (best is None) == (found is None) == (alone is None)
    if best:
        assert found[1] <= best * (1 + 1e-6)
        assert alone[1] <= best * 1.10  # the search without the list


@pytest.mark.parametrize("seed", range(2))
def test_larger_problems_have_valid_plans_and_chains_are_no_better(seed):
    problem = mixed_problem(seed)
    ours, chains, even = (run(planner, problem) for planner in (GraphPipe(colocate="never"), Sequential(), Even()))
    for other in (chains, even):
        assert other is None or (ours is not None and ours[1] <= other[1] * (1 + 1e-9))


def test_stages_are_as_long_as_their_devices_are_fast():
    """A chain of ten equal operators on speeds 1, 1, 1/4, 1/4: four operators for each fast device, one for each slow one."""
    problem = Problem(graph=chain(10), cluster=with_devices(cluster(4), FAST, SLOW, SLOW, FAST), cost=Constant(), minibatch_size=64)
    plan, _ = run(GraphPipe(colocate="never", replication=False, max_candidates=0), replace(problem, microbatch_size=1))
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


def test_everywhere_lists_placements_that_differ_once():
    problem = Problem(graph=chain(2), cluster=with_devices(cluster(3), FAST, FAST, SLOW), cost=Constant(), minibatch_size=4)
    found = list(everywhere(Assessor(StageCosts(problem)), ((0b01, 1), (0b10, 1)), 1, False, float("inf")))
    assert [c.placement for c in found if isinstance(c, Candidate)] == [((0,), (1,)), ((0,), (2,)), ((2,), (0,))]


def test_lines_are_laid_out_by_device_type():
    """The limit is the least: ten operators on speeds 1 and 1/4 take as long as eight on the first."""
    problem = Problem(graph=chain(10), cluster=with_devices(cluster(2), FAST, SLOW), cost=Constant(), minibatch_size=64)
    costs, placer = StageCosts(average(problem)[0]), Placer(problem.cluster)
    layouts = HeterogeneousChain(costs, problem, placer, tuple(range(10)), depth_scale=1.0).layouts()
    least = min(layouts)
    sizes = {
        mask.bit_count(): placer.cluster.devices[placer.types[types[0]]].speed_factor
        for (mask, _), types in zip(*least[2:], strict=True)
    }
    assert sizes == {8: 1.0, 2: 0.25}
