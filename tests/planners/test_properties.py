"""What holds for every planner on every problem."""

from __future__ import annotations

import itertools
import random
import re
from dataclasses import replace

import numpy as np
import pytest

from gpp import (
    Adam,
    Even,
    GraphPipe,
    Muon,
    NAdam,
    OneFOneB,
    PipeDream,
    PipeDream2BW,
    Piper,
    Sequential,
    Split1F1B,
    Strategy,
    ZeroBubbleH1,
    ZeroBubbleH2,
)
from gpp.cost.models.constant import Constant
from gpp.cost.problem import Problem
from gpp.errors import Infeasible
from gpp.graph.op_graph import Input, OpGraph, Tensor, bits
from gpp.mechanisms.marks.stage import marks_of
from gpp.plan.build import make_plan
from gpp.planners.chains.chain_tables import Tables
from gpp.planners.chains.downsets import Budget, StateFamily, linear_states
from gpp.planners.common.candidates import Assessor, Candidate, Shortage
from gpp.planners.common.linear_orders import Intervals, depth_first_order
from gpp.planners.common.stage_costs import StageCosts
from gpp.serialization import from_json, to_json
from tests.oracle.exhaustive import Exhaustive
from tests.support.graphs import in_halves, within
from tests.support.long import thinned
from tests.support.problems import cluster, one_f_one_b_s, random_problem, run, towers

PLANNERS = (
    Even(),
    Sequential(),
    GraphPipe(colocate="never"),
    Sequential(replication=False),
    GraphPipe(colocate="never", replication=False),
    PipeDream2BW(),
)
SAMPLE_OF_FOUR = [0, *(pytest.param(block, marks=pytest.mark.long) for block in range(1, 4))]


@pytest.mark.parametrize("seed", thinned(range(8)))
def test_plans_are_valid(seed):
    """Strategy.plan validates: partition, convexity, devices, edges, memory. The rest is checked here."""
    problem = random_problem(seed, max_ops=14, max_devices=6)
    for planner in PLANNERS:
        found = run(planner, problem)
        if found is None:
            continue
        plan, seconds = found
        assert sorted(op for stage in plan.stages for op in stage.ops) == list(range(problem.graph.num_ops))
        assert plan.num_devices <= problem.cluster.num_devices
        assert plan.explanation and plan == from_json(type(plan), to_json(plan))
        b = plan.stages[0].microbatch_size
        for s, stage in enumerate(plan.stages):
            assert stage.microbatch_size == b and b % len(stage.devices) == 0 and stage.k == 1
            assert stage.in_flight == min(plan.distance_to_sink[s] * b, problem.minibatch_size)
        assert seconds > 0


@pytest.mark.parametrize("seed", thinned(range(25), 3))
def test_plans_of_authors_are_chains(seed):
    """Each by its own objective; stages have more than one device only where replicas are allowed, and nothing is recomputed."""
    problem = random_problem(seed, max_ops=12, max_devices=6)
    variants = {PipeDream: ({"states": "linear"}, {"hierarchical": False}), Piper: ({"linearize": "always"},)}
    for planner in (made(**more) for made, own in variants.items() for more in ({}, {"replication": False}, *own)):
        found = run(planner, problem)
        if found is not None:
            plan, seconds = found
            assert all((s, s + 1) in plan.edges for s in range(len(plan.stages) - 1)) and seconds > 0
            assert plan.num_devices <= problem.cluster.num_devices and plan.explanation[0].startswith("own objective")
            assert all(stage.microbatch_size % len(stage.devices) == 0 for stage in plan.stages)
            assert planner.replication or all(len(stage.devices) == 1 for stage in plan.stages)
            assert not any(marks_of(stage).recompute for stage in plan.stages)


@pytest.mark.parametrize("seed", thinned(range(10)))
def test_prediction_agrees_with_the_definition_of_1f1b(seed):
    """Where links cost nothing and nothing is reduced, an independent simulation gives the same seconds."""
    problem = random_problem(seed, max_ops=9, max_devices=4)
    problem = replace(problem, cluster=cluster(problem.cluster.num_devices), cost=Constant(fixed_s=1e6))
    plan, seconds = run(GraphPipe(colocate="never", replication=False), problem)
    assert one_f_one_b_s(plan, problem) == pytest.approx(seconds)


@pytest.mark.parametrize("seed", thinned(range(15), 3))
def test_bound_is_below_the_prediction(seed):
    problem = random_problem(seed, max_ops=12, max_devices=6)
    strategy = Strategy(name="test", planner=Even(), schedule=OneFOneB())
    assessor = Assessor(StageCosts(problem))
    for planner in PLANNERS[:3]:
        found = run(planner, problem)
        if found:
            plan, seconds = found
            parts = [(sum(1 << op for op in stage.ops), len(stage.devices)) for stage in plan.stages]
            chain = any(not tensors for tensors in plan.edge_tensors(problem.graph).values()) or planner is PLANNERS[1]
            candidate = assessor.assess(parts, plan.stages[0].microbatch_size, chain=chain)
            assert isinstance(candidate, Candidate)
            assert 0.3 * seconds < candidate.bound_s <= seconds * (1 + 1e-9)
            other = make_plan(problem, "x", candidate.parts, candidate.microbatch_size, chain=chain, ordered=True)
            assert strategy.predict(other, problem).metrics.iteration_s == pytest.approx(seconds)


@pytest.mark.parametrize("seed", thinned(range(6)))
@pytest.mark.parametrize("schedule", [Split1F1B(), ZeroBubbleH1(), ZeroBubbleH2()], ids=lambda s: type(s).__name__)
def test_a_bound_lets_second_halves_wait(schedule, seed):
    """It is below the prediction, and near it; both find the same peaks with and without a program."""
    rng, problem = random.Random(seed), random_problem(seed, max_ops=10, max_devices=6)
    strategy = Strategy(name="test", planner=Even(), schedule=schedule)
    problem = strategy.posed(replace(problem, graph=in_halves(problem.graph)))
    assessor, n = Assessor(StageCosts(problem)), problem.graph.num_ops
    for b in problem.microbatch_sizes():
        cuts = [0, *sorted(rng.sample(range(1, n), rng.randint(1, min(n, problem.cluster.num_devices)) - 1)), n]
        parts = [(((1 << j) - 1) ^ ((1 << i) - 1), 1) for i, j in itertools.pairwise(cuts)]
        found = assessor.assess(parts, b, chain=rng.random() < 0.5)
        if isinstance(found, Candidate):
            plan = make_plan(problem, "x", found.parts, b, chain=found.chain, ordered=True, placement=found.placement)
            fast, whole = (strategy.predict(plan, problem, record=record).metrics for record in (False, True))
            assert 0.5 * fast.iteration_s < found.bound_s <= fast.iteration_s * (1 + 1e-9)
            assert fast.peak_memory_bytes == whole.peak_memory_bytes


@pytest.mark.parametrize("seed", thinned(range(10)))
def test_assessor_and_plan_agree_on_memory(seed):
    problem = random_problem(seed, max_ops=10, max_devices=5)
    assessor = Assessor(StageCosts(problem))
    cuts = sorted({problem.graph.num_ops * k // problem.cluster.num_devices for k in range(problem.cluster.num_devices + 1)})
    parts = [(((1 << j) - 1) ^ ((1 << i) - 1), 1) for i, j in itertools.pairwise(cuts)]
    for b in problem.microbatch_sizes():
        plan = make_plan(problem, "x", parts, b, chain=True, ordered=True)
        verdict = assessor.assess(parts, b, chain=True)
        if isinstance(verdict, Shortage):
            with pytest.raises(Infeasible):
                plan.validate(problem)
        else:
            plan.validate(problem)


@pytest.mark.parametrize("block", thinned(range(10), 10))
def test_graphpipe_is_never_predicted_slower_than_sequential(block):
    """In a block, 8 series-parallel graphs and 4 others; `tests.checks.planners --what dags` compares on larger ones."""
    for seed in range(12 * block, 12 * block + 12):
        problem = random_problem(seed, max_ops=10, max_devices=5, series_parallel=seed % 3 > 0)
        chain, graph = run(Sequential(), problem), run(GraphPipe(colocate="never"), problem)
        assert chain is None or (graph is not None and graph[1] <= chain[1] * (1 + 1e-9))


@pytest.mark.parametrize("block", SAMPLE_OF_FOUR)
def test_graphpipe_equals_the_oracle_of_its_space(block, record_property):
    """And comes close to the oracle of all convex partitions; the gap is recorded."""
    gaps = []
    for seed in range(8 * block, 8 * block + 8):
        problem = random_problem(seed, max_ops=8 if seed % 8 == 0 else 6, max_devices=4)
        found, own, convex = (run(p, problem) for p in (GraphPipe(colocate="never"), Exhaustive(space="graphpipe"), Exhaustive()))
        assert (found is None) == (own is None)
        if found and own and convex:
            assert convex[1] * (1 - 1e-9) <= found[1] <= own[1] * (1 + 1e-9)
            gaps.append(found[1] / convex[1] - 1)
    record_property("largest_gap_to_convex", max(gaps, default=0.0))
    print(f"gap to all convex partitions: largest {max(gaps, default=0.0):.2%}, of {len(gaps)} graphs")
    assert max(gaps, default=0.0) < 0.1


@pytest.mark.parametrize("seed", thinned(range(6)))
def test_no_chain_beats_sequential_by_much(seed):
    """Sequential is exact for its estimate; the estimate leaves out what transfers do to a full pipeline."""
    problem = random_problem(200 + seed, max_ops=7, max_devices=4)
    problem = replace(problem, cluster=cluster(problem.cluster.num_devices, problem.cluster.devices[0].memory_bytes))
    strategy = Strategy(name="test", planner=Even(), schedule=OneFOneB())
    found = run(Sequential(replication=False), problem)
    assessor = Assessor(StageCosts(problem, replication=False))
    for b in problem.microbatch_sizes():
        for masks in _chains(problem):
            candidate = assessor.assess([(mask, 1) for mask in masks], b, chain=True)
            if isinstance(candidate, Candidate):
                plan = make_plan(problem, "x", candidate.parts, b, chain=True, ordered=True)
                assert found[1] <= strategy.predict(plan, problem).metrics.iteration_s * 1.01


def _chains(problem):
    order, n = depth_first_order(problem.graph), problem.graph.num_ops
    for cut in range(1 << (n - 1)):
        masks, mask = [], 0
        for i, op in enumerate(order):
            mask |= 1 << op
            if cut >> i & 1 or i == n - 1:
                masks.append(mask)
                mask = 0
        if len(masks) <= problem.cluster.num_devices:
            yield masks


def test_order_of_identical_branches_does_not_matter():
    plans = []
    for names in (["a", "b", "c"], ["c", "a", "b"]):
        problem = Problem(graph=towers(3, 2, names=names), cluster=cluster(6, 100.0), cost=Constant(fixed_s=0.5), minibatch_size=16)
        plan, seconds = run(GraphPipe(colocate="never"), problem)
        plans.append((seconds, plan.depth, sorted(len(stage.ops) for stage in plan.stages)))
    assert plans[0] == plans[1]


@pytest.mark.parametrize(
    "planner",
    [Even(), Sequential(), GraphPipe(colocate="never"), PipeDream2BW(), PipeDream(), Piper()],
    ids=lambda p: type(p).__name__,
)
def test_infeasible_says_what_lacks_and_what_would_fit(planner):
    problem = Problem(graph=towers(2, 3, saved=1000.0), cluster=cluster(3, 1500.0), cost=Constant(), minibatch_size=8)
    strategy = Strategy(name="test", planner=planner, schedule=OneFOneB())
    with pytest.raises(Infeasible) as caught:
        strategy.plan(problem)
    text = str(caught.value)
    assert "lacks" in text and "b" in caught.value.constraint and "1.50 kB" in text
    enough = float(re.search(r"memory_bytes=([\d.e+]+)", caught.value.remedy)[1])
    strategy.plan(replace(problem, cluster=cluster(3, enough * 1.001)))
    with pytest.raises(Infeasible):
        strategy.plan(replace(problem, cluster=cluster(3, enough * 0.98)))


@pytest.mark.parametrize("planner", [PLANNERS[0], *PLANNERS[3:]], ids=lambda p: type(p).__name__)
def test_infeasible_names_a_smaller_microbatch(planner):
    problem = Problem(
        graph=towers(2, 3, saved=100.0), cluster=cluster(3, 1500.0), cost=Constant(), minibatch_size=8, microbatch_size=8
    )
    strategy = Strategy(name="test", planner=planner, schedule=OneFOneB())
    with pytest.raises(Infeasible) as caught:
        strategy.plan(problem)
    size = int(re.search(r"microbatch_size=(\d)", caught.value.remedy)[1])
    assert strategy.plan(replace(problem, microbatch_size=size)).stages[0].microbatch_size == size


def test_tables_say_what_the_problem_says():
    for seed in range(10):
        problem = random_problem(seed, max_ops=12, max_devices=4)
        graph = problem.graph
        shared = replace(graph.ops[-1], params=(*graph.ops[-1].params, *graph.ops[0].params)) if graph.num_ops > 1 else graph.ops[0]
        ops = *graph.ops[:-1], shared
        free = tuple(replace(t, saved=i % 2 == 0, differentiable=i % 3 != 0) for i, t in enumerate(graph.tensors))
        taking = tuple(
            replace(op, transient_bytes=i * 7 % 5 * op.saved_bytes, fixed_bytes=i * 3 % 4 * 1e6) for i, op in enumerate(ops)
        )
        taking = tuple(replace(op, inputs=("x",) if i % 3 else ("x", "y")[i % 2 :]) for i, op in enumerate(taking))
        inputs = Input(name="x", bytes_per_sample=3e4), Input(name="y", bytes_per_sample=5e5)
        narrow = [
            replace(p, name=f"{p.name} narrow", num_bytes=p.num_bytes // 3, trainable=False, copy_of=p.name) for p in graph.params
        ]
        taking = tuple(replace(op, params=(*op.params, *(f"{p} narrow" for p in op.params))) for op in taking)
        graph = OpGraph(name="g", ops=taking, tensors=free, params=(*graph.params, *narrow), inputs=inputs)
        optimizer = (Adam(lr=0.1), NAdam(lr=0.1), Muon(lr=0.1))[seed % 3]
        problem = replace(problem, graph=graph, optimizer=optimizer)
        costs = StageCosts(problem)
        table = Intervals(costs, depth_first_order(graph))
        family = StateFamily(graph, linear_states(table.order), np.ones(graph.num_ops), Budget("test", 60.0, 1e9))
        found = Tables(problem, family).of(np.arange(family.num_pairs)).amounts
        masks = [family.masks[start] & ~family.masks[end] for start, end in zip(family.start, family.end, strict=True)]
        for i in range(graph.num_ops):
            for j in range(i + 1, graph.num_ops + 1):
                mask = table.mask(i, j)
                amounts = problem.amounts(mask)
                assert table.amounts.take((i, j)) == pytest.approx(amounts)
                assert found.take(masks.index(mask))._replace(late=amounts.late) == pytest.approx(amounts)
                read = [graph.param_of[name] for name in {p for op in bits(mask) for p in graph.ops[op].params}]
                sizes, copies = [p.num_bytes for p in read if p.trainable], sum(p.num_bytes for p in read if p.copy_of)
                assert amounts.version == sum(sizes) + copies
                of_all, of_largest = optimizer.update_factors
                more = of_all * sum(sizes) + of_largest * max(sizes, default=0)
                assert amounts.update == (more - copies if of_all + of_largest else 0.0)
        mask, b = graph.all_mask, costs.microbatch_sizes[-1]
        for r in costs.replicas[b]:
            assert costs.compute_s(mask, b // r) == pytest.approx(
                sum(problem.stage_times(tuple(range(graph.num_ops)), b, tuple(range(r))))
            )


@pytest.mark.parametrize(
    ("planner", "seed", "share"),
    [(GraphPipe(), 0, 0.9), (GraphPipe(colocate="never"), 0, 0.9), (PipeDream(), 5, 1.1), (Piper(), 5, 1.1)],
)
def test_planners_know_what_an_update_takes(planner, seed, share):
    """Weights decide what fits; without the update's bytes, the plans that planners proposed were refused by their bills."""
    problem = random_problem(seed, max_ops=6, max_devices=3)
    graph = replace(problem.graph, params=tuple(replace(p, num_bytes=p.num_bytes * 8) for p in problem.graph.params))
    limit = 5 * share * sum(p.num_bytes for p in graph.params) / problem.cluster.num_devices
    problem = replace(within(problem, limit), graph=graph, optimizer=NAdam(lr=0.1), optimizer_state_factor=2.0)
    best, found = run(Exhaustive(), problem), run(planner, problem)
    assert best and found and found[1] <= best[1] * 1.05


def test_tensor_without_consumers_is_harmless():
    graph = towers(2, 2)
    out = Tensor(name="out", producer=graph.num_ops - 1, consumers=(), bytes_per_sample=4.0)
    graph = replace(graph, tensors=(*graph.tensors, out))
    problem = Problem(graph=graph, cluster=cluster(3), cost=Constant(), minibatch_size=4)
    assert all(run(planner, problem) for planner in PLANNERS)
