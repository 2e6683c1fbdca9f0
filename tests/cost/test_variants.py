"""Stages that recompute or split operators: their time and memory, in plans, the simulator and the scores."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baselines.reference.reference import Reference
from gpp import Distributed, Even, OneFOneB, Plan, Strategy
from gpp.cluster import Link
from gpp.cost.models.constant import Constant
from gpp.cost.problem import Problem
from gpp.cost.stage import pass_times
from gpp.cost.variants import Repeats
from gpp.errors import InvalidPlan, UnsupportedPlan
from gpp.mechanisms.marks.stage import marked
from gpp.mechanisms.tensor_parallel.stage import TensorParallel
from gpp.plan.build import make_plan
from gpp.program.program import check_program, reduce_groups
from gpp.routing import copies
from gpp.runtime.task import EngineTask
from gpp.serialization import from_json, to_json
from tests.support.bills import peak_bytes
from tests.support.graphs import chain
from tests.support.problems import cluster, split_plan, split_problem
from tests.support.programs import lower

STRATEGY = Strategy(name="test", planner=Even(), schedule=OneFOneB())


def test_recomputation_by_the_general_rule():
    """Nothing of a run is kept, the run is there once, and its forward passes run twice."""
    problem = Problem(graph=chain(3, saved=10.0), cluster=cluster(1), cost=Constant(), minibatch_size=8)
    assert problem.stage_times((0, 1, 2), 2, (0,)) == (6.0, 12.0)
    assert problem.split_times((0, 1, 2), 2, (0,), 1, Repeats(again=(1, 2)))[:2] == (6.0, 16.0)
    whole = peak_bytes(problem, (0, 1, 2), 2, 1, 8)
    # 10 bytes of two operators and 2 samples are there once instead of four times.
    assert whole - peak_bytes(problem, (0, 1, 2), 2, 1, 8, (1, 2)) == 2 * 10 * 2 * 3
    # Of two runs one is there at a time; the first one is computed again while the gradient of its tensor of 1 byte is there.
    assert whole - peak_bytes(problem, (0, 1, 2), 2, 1, 8, (0, 2)) == 2 * 10 * 2 * 4 - (10 + 1) * 2
    assert peak_bytes(problem, (0, 1, 2), 2, 1, 2, (1, 2)) == peak_bytes(problem, (0, 1, 2), 2, 1, 2)


def test_a_declared_degree_sets_time_memory_and_boundary():
    problem = split_problem()
    forward, backward, _ = pass_times(problem, split_plan(problem).stages[1], 2)
    boundary = 3.0 * 2 / 10.0
    assert forward == pytest.approx(0.2 * 3 * 2 + boundary) and backward == pytest.approx(0.4 * 3 * 2 + boundary)
    # Half of the weights and gradients, the declared activations, the boundary's tensors and their gradients.
    assert peak_bytes(problem, (1,), 2, 2, 4, (), 2) == pytest.approx(2 * 50 + (6 + 1) * 2 * 2 + (1 + 1) * 2)
    assert problem.trainable_bytes((1,), 2) == 50


@pytest.mark.parametrize("replicas", [1, 2])
def test_simulator_and_score_agree_on_split_and_recomputed_stages(replicas):
    problem = split_problem(2 + 2 * replicas)
    plan = split_plan(problem, replicas)
    plan = replace(plan, stages=(marked(plan.stages[0], recompute=(0,)), *plan.stages[1:]))
    plan.validate(problem)
    check_program(lower(plan, problem.graph, OneFOneB()), reduce_groups(plan, problem.graph))
    told, scored = (STRATEGY.predict(plan, problem, record=record).metrics for record in (True, False))
    assert told.iteration_s == pytest.approx(scored.iteration_s)
    assert told.peak_memory_bytes == scored.peak_memory_bytes and len(told.peak_memory_bytes) == plan.num_devices
    assert from_json(Plan, to_json(plan)) == plan


def test_each_part_of_a_split_parameter_is_reduced_over_the_replicas():
    problem = split_problem(6)
    groups = reduce_groups(split_plan(problem, 2), problem.graph)
    assert [(group.devices, group.params, group.num_bytes(problem.graph)) for group in groups] == [
        ((1, 3), ("w",), 50.0),
        ((2, 4), ("w",), 50.0),
    ]


def test_a_split_stage_is_faster_where_links_cost_nothing():
    problem = split_problem(4, Link(latency_s=0.0, bandwidth_bytes_per_s=1e30))
    whole = make_plan(problem, "x", [(1, 1), (2, 1), (4, 1)], 2, chain=True, ordered=True)
    assert STRATEGY.predict(split_plan(problem), problem).metrics.iteration_s < STRATEGY.predict(whole, problem).metrics.iteration_s


def test_every_device_of_a_replica_gets_one_copy():
    assert copies((0, 1), (4, 5, 6, 7)) == [(0, 4), (1, 5), (0, 6), (1, 7)]
    assert copies((4, 5), (0,)) == [(4, 0)]


def test_plans_that_split_what_declares_nothing_are_refused():
    problem = split_problem()
    plan = make_plan(problem, "x", [(3, 2), (4, 1)], 2, chain=True, ordered=True)
    split = replace(plan, stages=(plan.stages[0].having(TensorParallel(degree=2)), plan.stages[1]))
    with pytest.raises(InvalidPlan, match=r"op0 declares degrees \[1\], not 2"):
        split.validate(problem)
    with pytest.raises(InvalidPlan, match="must divide its 2 devices"):
        replace(plan, stages=(plan.stages[0].having(TensorParallel(degree=3)), plan.stages[1])).validate(problem)
    with pytest.raises(InvalidPlan, match=r"recompute=\[2\] names operators that are not its own"):
        replace(plan, stages=(marked(plan.stages[0], recompute=(2,)), plan.stages[1])).validate(problem)
    with pytest.raises(InvalidPlan, match=r"operators \[1\] are in boundaries, .* not in recompute"):
        replace(plan, stages=(marked(plan.stages[0], recompute=(0,), boundaries=(1,)), plan.stages[1])).validate(problem)
    tied = replace(problem.graph, ops=(replace(problem.graph.ops[0], params=("w",)), *problem.graph.ops[1:]))
    problem = replace(problem, graph=tied)
    with pytest.raises(InvalidPlan, match="another stage reads it too"):
        split_plan(problem).validate(problem)


def test_engines_that_run_refuse_what_they_cannot():
    problem = split_problem()
    plan, task = split_plan(problem), EngineTask(graph=problem.graph, losses={}, clips=False)
    again = replace(plan, stages=(plan.stages[0], marked(plan.stages[1], recompute=(1,)), *plan.stages[2:]))
    with pytest.raises(UnsupportedPlan, match=r"stage 1 computes operators .* again and splits its operators over 2 devices"):
        Distributed().refuse_plan(again, task)
    with pytest.raises(UnsupportedPlan, match=r"stage 1 splits its operators over 2 devices,.*tensor_parallel=false"):
        Reference().check(plan)
