from __future__ import annotations

from dataclasses import replace

import pytest

from gpp import Link, PipeDream, Sequential
from gpp.cost.models.constant import Constant
from gpp.cost.problem import Problem
from gpp.errors import Infeasible
from gpp.graph.op_graph import bits
from gpp.planners.chains.downsets import Budget, all_states, linear_states
from tests.support.graphs import chain, diamond, two_towers, with_weights
from tests.support.long import thinned
from tests.support.problems import cluster, random_problem, run, towers


def test_states_are_the_downsets():
    budget = Budget("x", 60, 1e9)
    assert len(all_states(towers(2, 16, fork=True), 1000, budget)) == 17**2 + 2
    assert all_states(towers(2, 16, fork=True), 100, budget) is None
    for graph in (chain(5), diamond(), two_towers(3)):
        masks = all_states(graph, 1000, budget)
        assert len(set(masks)) == len(masks)
        assert all(not graph.successors[op] & ~mask for mask in masks for op in bits(mask))
    assert set(linear_states((0, 1, 2, 3))) <= set(all_states(diamond(), 100, budget))


@pytest.mark.parametrize("first", thinned((0, 20)))
def test_stays_near_the_best_chains(first):
    """Its objective leaves out filling and draining; on average that costs little."""
    ratios = []
    for seed in range(first, first + 20):
        problem = random_problem(seed, max_ops=12, max_devices=5)
        mine, best = run(PipeDream(), problem), run(Sequential(), problem)
        if mine and best:
            ratios.append(mine[1] / best[1])
    assert sum(ratios) / len(ratios) < 1.05


def test_inner_stages_of_a_replicated_stretch_lie_in_each_node():
    """Two nodes of two devices, a slow network: a stretch on both nodes is a pipeline inside each."""
    graph = with_weights(chain(4, saved=0.0), 60)
    tensors = tuple(replace(tensor, bytes_per_sample=100.0 if i == 1 else 10.0) for i, tensor in enumerate(graph.tensors))
    graph = replace(graph, tensors=tensors)
    fast, slow = Link(latency_s=0.0, bandwidth_bytes_per_s=1e9), Link(latency_s=0.0, bandwidth_bytes_per_s=20.0)
    # No device holds the whole model, and the tensor in its middle is too large for the slow link.
    problem = Problem(graph=graph, cluster=cluster(4, 460.0, fast, slow, 2), cost=Constant(), minibatch_size=16, microbatch_size=2)
    plan, _ = run(PipeDream(), problem)
    assert [stage.devices for stage in plan.stages] == [(0, 2), (1, 3)]


def test_limits_are_infeasible_with_their_reason():
    problem = Problem(graph=towers(4, 6, fork=True), cluster=cluster(4), cost=Constant(), minibatch_size=8)
    with pytest.raises(Infeasible, match="100 antichains"):
        PipeDream(states="antichain", max_states=100).plan(problem, lambda plan: pytest.fail("nothing to predict"))
    with pytest.raises(Infeasible, match=r"time limit of 1e-09 s"):
        PipeDream(time_limit_s=1e-9).plan(problem, lambda plan: pytest.fail("nothing to predict"))
    with pytest.raises(Infeasible, match="memory limit is 1"):
        PipeDream(memory_limit_bytes=1).plan(problem, lambda plan: pytest.fail("nothing to predict"))
