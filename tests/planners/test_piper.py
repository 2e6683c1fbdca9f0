from __future__ import annotations

import itertools
import re
from contextlib import suppress

import pytest

from gpp import OneFOneB, Piper, Strategy
from gpp.cluster import flat
from gpp.cost.models.constant import Constant
from gpp.cost.problem import Problem
from gpp.errors import Infeasible
from gpp.graph.op_graph import mask_of
from gpp.graph.random_graphs import random_dag
from gpp.plan.build import make_plan
from tests.support.chain_objectives import piper_s
from tests.support.long import thinned
from tests.support.problems import cluster, random_problem, run, towers
from tests.support.published import profile


@pytest.mark.parametrize("seed", thinned(range(12)))
def test_objective_is_the_best_of_all_chains(seed):
    """Against a plain enumeration of all intervals, replicas and depths."""
    problem = random_problem(seed, max_ops=6, max_devices=4, series_parallel=True)
    if problem.cluster.num_devices > problem.graph.num_ops:
        return
    planner = Piper(linearize="always")
    from gpp.planners.chains.downsets import Budget
    from gpp.planners.chains.piper import PiperSearch
    from gpp.planners.common.linear_orders import depth_first_order

    search = PiperSearch(problem, planner, Budget("x", 60, 1e9))
    order = depth_first_order(problem.graph)
    for b in problem.microbatch_sizes():
        found = search.find(b)
        best = min(_all_chains(problem, order, b, search), default=None)
        assert (found is None) == (best is None)
        if found:
            assert found[0] == pytest.approx(best, rel=1e-9)


def _all_chains(problem, order, b, search):
    """The objective of every chain that fits."""
    n = len(order)
    for size in range(1, min(problem.cluster.num_devices, n) + 1):
        for inner in itertools.combinations(range(1, n), size - 1):
            masks = [mask_of(order[i:j]) for i, j in itertools.pairwise((0, *inner, n))]
            for counts in itertools.product(search.counts(b), repeat=size):
                if sum(counts) <= problem.cluster.num_devices:
                    plan = make_plan(problem, "x", list(zip(masks, counts, strict=True)), b, chain=True, ordered=True)
                    with suppress(Infeasible):
                        plan.validate(problem)
                        yield piper_s(plan, problem, search.link)


@pytest.mark.parametrize("num_ops", [4, 5, 6])
def test_what_is_said_to_need_least_memory_does(num_ops):
    """Of all chains over all orders of the operators, with all replicas and micro-batches, by the bill of the plan alone."""
    graph = random_dag(num_ops, num_ops, skew=1.0)
    problem = Problem(graph=graph, cluster=cluster(3, 1e4), cost=Constant(), minibatch_size=4, optimizer_state_factor=2.0)
    least = min(
        max(plan.device_memory(problem, {s: stage.in_flight for s, stage in enumerate(plan.stages)}).values())
        for parts in _all_parts(graph, 3, frozenset())
        for b in (1, 2, 4)
        if all(b % replicas == 0 for _, replicas in parts)
        for plan in [make_plan(problem, "x", parts, b, chain=True, ordered=True)]
    )
    with pytest.raises(Infeasible) as refused:
        Strategy(name="test", planner=Piper(), schedule=OneFOneB()).plan(problem)
    named = float(re.search(r"cluster\.memory_bytes=(\S+)\)", str(refused.value))[1])
    assert least <= named <= least * 1.006  # to half a per cent, and rounded up


def _all_parts(graph, devices, done):
    """Every chain of operators with devices, after those that are done."""
    rest = sorted(set(range(graph.num_ops)) - done)
    if not rest:
        yield []
    for ops in itertools.chain.from_iterable(itertools.combinations(rest, size) for size in range(1, len(rest) + 1) if devices):
        held = done | {*ops}
        if all(t.producer in held for t in graph.tensors for consumer in t.consumers if consumer in ops):
            for replicas in range(1, devices + 1):
                for parts in _all_parts(graph, devices - replicas, held):
                    yield [(mask_of(ops), replicas), *parts]


def test_tensor_parallel_degrees_are_used_where_they_are_declared():
    """BERT's layers declare 1, 2, 4 and 8; a stage that is split has them all."""
    graph = profile("piper_bert32a100.json")
    problem = Problem(
        graph=graph,
        cluster=flat(num_devices=8, bandwidth_bytes_per_s=25e9, memory_bytes=16e9),
        cost=Constant(),
        minibatch_size=8,
        microbatch_size=1,
        optimizer_state_factor=2.0,
    )
    without, _ = run(Piper(tensor_parallel=False), problem)
    assert all(stage.devices_per_replica == 1 for stage in without.stages)
    plan, seconds = run(Piper(), problem)
    assert any(stage.devices_per_replica > 1 for stage in plan.stages)
    strategy = Strategy(name="test", planner=Piper(), schedule=OneFOneB())
    assert strategy.predict(plan, problem).metrics.iteration_s == pytest.approx(seconds)


def test_linearises_where_the_released_planner_stops():
    problem = Problem(graph=towers(4, 14, fork=True), cluster=cluster(4), cost=Constant(fixed_s=0.1), minibatch_size=8)
    with pytest.raises(Infeasible, match="40,000 downsets"):
        Piper(linearize="never").plan(problem, lambda plan: pytest.fail("nothing to predict"))
    plan, _ = run(Piper(), problem)
    assert "one depth-first order (the graph itself has more than" in plan.explanation[0]
