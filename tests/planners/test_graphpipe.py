"""The paper's own examples, and what a graph of stages is for."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from gpp import Cluster, GPipe, GraphPipe, Sequential, Strategy
from gpp.cost.models.constant import Constant
from gpp.cost.problem import Problem
from gpp.graph.op_graph import Op, OpGraph, Tensor
from gpp.graph.random_graphs import random_dag
from gpp.planners.graphpipe import graphpipe
from tests.support.graphs import chain
from tests.support.long import thinned
from tests.support.operations import calls
from tests.support.problems import Rate, cluster, random_problem, run, towers
from tests.support.series_parallel import decompose


def case_study(memory_samples: int) -> Problem:
    """Two branches of four blocks and a concatenation on eight devices (section 7.5); a block keeps one byte a sample.

    A block also keeps its input and has its boundary's gradients, of a thousandth of a byte each.
    """
    return Problem(graph=towers(2, 4), cluster=cluster(8, memory_samples + 8.0), cost=Constant(fixed_s=0.5), minibatch_size=128)


def test_case_study():
    """The same devices, with room for 22 samples at the first stage: the chain has to take micro-batch 2, the graph can take 4.

    The paper counts depth 4, without the stage in which the concatenation sits: at the level of stages the other
    branch feeds it, which makes 5, so the graph holds 20 samples at most where the paper has 16 (the chain: 8 x 2 = 16).
    """
    graph, graph_s = run(GraphPipe(replication=False, colocate="never"), case_study(16))
    chain, chain_s = run(Sequential(replication=False), case_study(16))
    assert (len(graph.stages), graph.depth, graph.stages[0].microbatch_size) == (8, 5, 4)
    assert (len(chain.stages), chain.depth, chain.stages[0].microbatch_size) == (8, 8, 2)
    assert sorted(len(stage.ops) for stage in graph.stages) == [1] * 7 + [2]
    assert max(stage.in_flight for stage in graph.stages) == 20 and max(stage.in_flight for stage in chain.stages) == 16
    assert 1.1 < chain_s / graph_s < 1.4  # the paper: 20 % of throughput


def test_join_shares_a_stage_with_a_branch():
    """Four branches on four devices: no device is spent on a concatenation."""
    problem = Problem(graph=towers(4, 3), cluster=cluster(4), cost=Constant(), minibatch_size=16)
    plan, _ = run(GraphPipe(colocate="never", replication=False), problem)
    assert (len(plan.stages), plan.depth) == (4, 2)


def test_fork_shares_a_stage_with_a_branch():
    problem = Problem(graph=towers(4, 3, fork=True), cluster=cluster(4), cost=Constant(), minibatch_size=16)
    plan, seconds = run(GraphPipe(replication=False, colocate="never"), problem)
    assert len(plan.stages) == 4 and seconds < run(Sequential(replication=False), problem)[1]


@pytest.mark.parametrize(("branches", "devices"), [(7, 4), (14, 8), (6, 3), (8, 2)])
def test_more_branches_than_devices_are_grouped(branches, devices):
    problem = Problem(graph=towers(branches, 2), cluster=cluster(devices), cost=Constant(), minibatch_size=32)
    plan, seconds = run(GraphPipe(colocate="never", replication=False), problem)
    assert plan.depth == 2 and len(plan.stages) == devices
    largest = max(len(stage.ops) for stage in plan.stages)
    assert largest <= 2 * -(-branches // devices) + 1
    assert seconds <= run(Sequential(replication=False), problem)[1]


def test_replicas_of_a_large_operator():
    """One operator of four times the time gets several devices, where memory forbids to replicate everything."""
    graph = towers(1, 7)
    graph = replace(graph, ops=(*graph.ops[:2], replace(graph.ops[2], forward_flops=4.0, backward_flops=8.0), *graph.ops[3:]))
    problem = Problem(graph=graph, cluster=cluster(8, 12.0), cost=Constant(), minibatch_size=64)
    plan, seconds = run(GraphPipe(colocate="never"), problem)
    assert len(max(plan.stages, key=lambda stage: 2 in stage.ops).devices) > 1
    assert seconds < 0.8 * run(GraphPipe(replication=False, colocate="never"), problem)[1]


def test_graph_that_is_not_series_parallel_keeps_its_own_edges():
    for seed in range(10):
        problem = Problem(graph=random_dag(9, seed), cluster=cluster(4), cost=Rate(), minibatch_size=16)
        plan, _ = run(GraphPipe(colocate="never"), problem)
        if any("not series-parallel" in line for line in plan.explanation):
            assert any("critical path" in line for line in plan.explanation)
            chain = any("is a chain" in line for line in plan.explanation)
            assert chain or all(plan.edge_tensors(problem.graph).values())
            return
    pytest.fail("no graph was converted")


def test_whole_minibatch_in_flight_under_gpipe():
    problem = Problem(graph=towers(2, 4), cluster=cluster(4, 1e3), cost=Constant(), minibatch_size=16)
    plan = Strategy(name="x", planner=GraphPipe(colocate="never"), schedule=GPipe()).plan(problem)
    assert all(stage.in_flight == 16 for stage in plan.stages)


def test_heterogeneous_cluster_is_judged_on_its_own_devices():
    base = cluster(4)
    fast, slow = base.devices[0], replace(base.devices[0], speed_factor=0.5, memory_bytes=5e7)
    mixed = Cluster(
        name="mixed", devices=(fast, fast, slow, slow), nodes=base.nodes, intra_node=base.intra_node, inter_node=base.inter_node
    )
    problem = Problem(graph=towers(2, 3), cluster=mixed, cost=Constant(), minibatch_size=16)
    _, seconds = run(GraphPipe(colocate="never"), problem)
    assert seconds <= run(Sequential(), problem)[1]
    assert run(GraphPipe(colocate="never"), replace(problem, cluster=base))[1] < seconds


@pytest.mark.parametrize(("branches", "blocks"), thinned([(4, 16), (7, 6), (14, 4)], 3))
def test_search_takes_few_calls(branches, blocks):
    problem = Problem(
        graph=towers(branches, blocks, fork=True, saved=10.0),
        cluster=cluster(16, 900.0),
        cost=Constant(fixed_s=0.1),
        minibatch_size=256,
    )
    # 100 000 to 450 000 as this is written, which take a second.
    assert calls(lambda: run(GraphPipe(colocate="never"), problem)) < 2_000_000


@pytest.mark.parametrize("seed", thinned(range(8)))
def test_never_slower_than_a_chain_whatever_the_search_finds(seed, monkeypatch):
    """Above `SMALL`, where chains are no starts, and if its own search found nothing at all. Whole problems of that size:
    `python -m tests.checks.planners --what chains`, and `--what models`."""
    monkeypatch.setattr(graphpipe, "SMALL", 0)
    monkeypatch.setattr(GraphPipe, "_partitions", lambda *_: None)
    problem = random_problem(seed, max_ops=12, max_devices=8)
    chain = run(Sequential(), problem)
    if chain is not None:
        found = run(GraphPipe(colocate="never"), problem)
        assert found is not None and found[1] <= chain[1] * (1 + 1e-9)


def test_towers_that_exchange_values_stay_whole():
    """Two towers with a bridge at half height are not series-parallel; each still gets its own device at the same time."""
    left, right = range(6), range(6, 12)
    edges = [*itertools.pairwise(left), *itertools.pairwise(right), (2, 12), (8, 12), (12, 13), (13, 14), (5, 14), (11, 14)]
    # The three joining operators weigh as much as a tower.
    ops = tuple(
        Op(name=f"op{i}", forward_flops=1.0 + (i > 11), backward_flops=2.0 + 2.0 * (i > 11), saved_bytes=1.0) for i in range(15)
    )
    tensors = tuple(Tensor(name=f"t{a}_{b}", producer=a, consumers=(b,), bytes_per_sample=1.0) for a, b in sorted(edges))
    graph = OpGraph(name="bridged", ops=ops, tensors=tensors)
    assert decompose(graph) is None
    problem = Problem(graph=graph, cluster=cluster(3), cost=Constant(), minibatch_size=32, microbatch_size=1)
    plan, _ = run(GraphPipe(colocate="never", replication=False), problem)
    stage_of = {op: s for s, stage in enumerate(plan.stages) for op in stage.ops}
    assert len({stage_of[op] for op in left}) == len({stage_of[op] for op in right}) == 1
    assert plan.depth == 2


def test_fewer_replicas_than_devices_ask_for_a_pipeline():
    """Where copies of the whole model win, `max_replicas=2` makes stages of two devices, and 1 is `replication=False`."""
    problem = Problem(graph=chain(4), cluster=cluster(4), cost=Constant(), minibatch_size=16)
    (copies, _), (pairs, _) = (run(GraphPipe(max_replicas=most), problem) for most in (None, 2))
    assert [len(stage.devices) for stage in copies.stages] == [4]
    assert len(pairs.stages) > 1 and {len(stage.devices) for stage in pairs.stages} == {2}
    single, plain = (run(planner, problem)[0] for planner in (GraphPipe(max_replicas=1), GraphPipe(replication=False)))
    assert single.stages == plain.stages and max(len(stage.devices) for stage in single.stages) == 1
