"""Degrees that captured models declare: what they cost in the one bill, and who plans them."""

from dataclasses import replace

import pytest

from gpp import Adam, Analytical, Cluster, Even, GraphPipe, Link, Muon, OneFOneB, Piper, Plan, Strategy
from gpp.cost.models.constant import Constant
from gpp.cost.problem import Problem
from gpp.cost.stage import StageCost
from gpp.errors import Infeasible
from gpp.graph.coarsen.coarsen import coarsen
from gpp.mechanisms.tensor_parallel.searching import splits
from gpp.planners.base import AbstractPlanner
from gpp.stage import Stage
from tests.support.inprocess import CPU, captured_named
from tests.support.problems import cluster, towers
from tests.support.split import split_stages

FAST, SLOW = Link(latency_s=1e-6, bandwidth_bytes_per_s=1e12), Link(latency_s=1e-2, bandwidth_bytes_per_s=1e9)
STRATEGY = Strategy(name="test", planner=Even(), schedule=OneFOneB())


def devices(count: int, link: Link, memory_bytes: float = 1e12) -> Cluster:
    device = replace(CPU, memory_bytes=memory_bytes, kernel_latency_s=0.0)
    return replace(cluster(count, link=link), devices=(device,) * count)


def gpt(count: int, link: Link, minibatch_size: int = 2) -> Problem:
    graph = coarsen(captured_named("char_gpt_small")[1].graph, 12)
    return Problem(graph=graph, cluster=devices(count, link), cost=Analytical(), minibatch_size=minibatch_size)


def planned(planner: AbstractPlanner, problem: Problem) -> tuple[Plan, float]:
    """A planner's plan, and its predicted seconds."""
    strategy = replace(STRATEGY, planner=planner)
    plan = strategy.plan(problem)
    return plan, strategy.predict(plan, problem, record=False).metrics.iteration_s


def whole(problem: Problem, degree: int, replicas: int = 1) -> Stage:
    return split_stages(problem, [(problem.graph.all_mask, replicas, degree)], problem.minibatch_size).stages[0]


@pytest.mark.parametrize("degree", [2, 4])
def test_the_bill_charges_shares_and_sums(degree: int) -> None:
    """Two sums of a layer's width a layer, and one of the embedding: Megatron's count, over a ring of the replica's devices."""
    free, slow = gpt(4, Link(latency_s=0.0, bandwidth_bytes_per_s=1e30)), gpt(4, SLOW)
    one, many = StageCost.of(free, whole(free, 1)), StageCost.of(free, whole(free, degree))
    assert many.forward_s < one.forward_s and many.backward_s < one.backward_s
    assert one.static_bytes / degree < many.static_bytes < 1.3 * one.static_bytes / degree
    assert one.microbatch_bytes / degree < many.microbatch_bytes < one.microbatch_bytes
    layers, tensor = 2, 8 * 2 * 32 * 64  # float64, samples, positions, width
    ring_s = 2 * (degree - 1) * (SLOW.latency_s + tensor / degree / SLOW.bandwidth_bytes_per_s)
    costly = StageCost.of(slow, whole(slow, degree))
    assert costly.forward_s - many.forward_s == pytest.approx((2 * layers + 1) * ring_s)
    assert costly.backward_s - many.backward_s == pytest.approx(2 * layers * ring_s)


def test_simulator_and_score_agree_on_plans_of_captured_models() -> None:
    problem = gpt(8, SLOW, 8)
    half = (1 << 6) - 1
    for shapes in ([(1, 2), (1, 1)], [(1, 1), (2, 2)], [(1, 4), (1, 2)], [(2, 2), (3, 1)]):
        masks = (half, problem.graph.all_mask & ~half)
        plan = split_stages(problem, [(mask, *shape) for mask, shape in zip(masks, shapes, strict=True)], 4)
        plan.validate(problem)
        told, scored = (STRATEGY.predict(plan, problem, record=record).metrics for record in (True, False))
        assert told.iteration_s == pytest.approx(scored.iteration_s)
        assert told.communication_bytes == scored.communication_bytes


def test_graphpipe_splits_operators_where_that_is_faster() -> None:
    """Two samples leave devices idle in any pipeline; on slow links they are better idle."""
    for link, helps in ((FAST, True), (SLOW, False)):
        problem = gpt(4, link)
        plain, plain_s = planned(GraphPipe(colocate="never"), problem)
        plan, seconds = planned(GraphPipe(colocate="never", tensor_parallel=True), problem)
        plan.validate(problem)
        assert any(stage.devices_per_replica > 1 for stage in plan.stages) == helps
        assert seconds < plain_s if helps else plan.stages == plain.stages
        assert plan.explanation[-1].startswith("tensor parallelism: ")


@pytest.mark.parametrize("planner", [Piper(), GraphPipe(colocate="never", tensor_parallel=True)], ids=["piper", "graphpipe"])
def test_no_operator_is_split_where_an_update_looks_at_whole_weights(planner: AbstractPlanner) -> None:
    problem = replace(gpt(4, FAST), microbatch_size=1, minibatch_size=1)
    for optimizer in (Adam(lr=0.1), Muon(lr=0.1)):
        plan, _ = planned(planner, replace(problem, optimizer=optimizer))
        assert any(stage.devices_per_replica > 1 for stage in plan.stages) == optimizer.elementwise


@pytest.mark.parametrize(("branches", "length"), [(1, 5), (2, 3), (3, 2)])
def test_models_without_degrees_are_planned_as_before(branches: int, length: int) -> None:
    """The same plan, and not one more search."""
    problem = Problem(graph=towers(branches, length), cluster=cluster(4), cost=Constant(), minibatch_size=8)
    plain, plan = (planned(GraphPipe(colocate="never", tensor_parallel=split), problem)[0] for split in (False, True))
    assert plan.stages == plain.stages and plan.explanation == plain.explanation
    assert not list(splits(problem))


@pytest.mark.parametrize(
    ("planner", "without"),
    [
        pytest.param(Piper(), Piper(tensor_parallel=False), marks=pytest.mark.long),
        (GraphPipe(colocate="never", tensor_parallel=True), GraphPipe(colocate="never")),
    ],
    ids=["piper", "graphpipe"],
)
def test_operators_are_split_where_nothing_else_fits(planner: AbstractPlanner, without: AbstractPlanner) -> None:
    """One table that fits on no device."""
    graph = coarsen(captured_named("char_gpt_small")[1].graph, 16)
    # As if it had a vocabulary of 20,000.
    largest = max(graph.params, key=lambda param: param.num_bytes)
    table = 100 * largest.num_bytes
    graph = replace(graph, params=tuple(replace(p, num_bytes=table) if p is largest else p for p in graph.params))
    problem = Problem(
        graph=graph, cluster=devices(4, FAST, 3.5 * table), cost=Analytical(), minibatch_size=8, optimizer_state_factor=2
    )
    with pytest.raises(Infeasible):
        planned(without, problem)
    plan, _ = planned(planner, problem)
    plan.validate(problem)
    assert any(stage.devices_per_replica > 1 for stage in plan.stages)
