from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from gpp.cluster import flat
from gpp.cost.models.constant import Constant
from gpp.cost.models.tabulated import Tabulated
from gpp.cost.problem import Problem
from gpp.errors import Infeasible, InvalidConfig
from gpp.planners.chains.knapsack import changed, changes, squeeze
from gpp.planners.chains.piper import Piper
from gpp.planners.chains.published.piper import published_plan
from gpp.schedules.one_f_one_b import OneFOneB
from gpp.strategy import Strategy
from tests.support.bills import peak_bytes
from tests.support.chain_objectives import ring_s
from tests.support.long import long
from tests.support.problems import cluster, random_problem, run, towers
from tests.support.published import GIB, PIPER_BERT, PIPER_BRANCHES, agrees, piper_bytes, piper_s, profile

BERT = {"memory_bytes": 8 * GIB, "bandwidth": 25 * GIB, "num_microbatches": 1920}
BRANCHES = {"memory_bytes": 16e9, "bandwidth": 25e9, "num_microbatches": 64}


@pytest.mark.parametrize("devices", [pytest.param(k, marks=long) if k > 256 else k for k in PIPER_BERT])
def test_values_of_the_released_planner_on_bert(devices):
    """Recomputation, tensor-parallel degrees 1 to 8, memory that binds."""
    plan = published_plan(profile("piper_bert32a100.json"), devices, **BERT)
    assert agrees(plan.value_s, PIPER_BERT[devices])
    assert sum(stage.replicas * stage.degree for stage in plan.stages) <= devices
    assert any(stage.recompute for stage in plan.stages)


@pytest.mark.parametrize(("name", "linear"), [case for case in PIPER_BRANCHES if case != ("b4x8", False)])
@pytest.mark.parametrize("ending", [".json", ".piper.json"])
def test_values_of_the_released_planner_on_branches(name, linear, ending):
    check_branches(name, linear, ending, (4, 8, 16, 32))


def test_values_on_four_branches_with_all_downsets():
    """6,565 downsets and 4.1 million pairs, for which the released tool takes 34 s."""
    check_branches("b4x8", False, ".json", (4,))


@long
def test_values_on_four_branches_with_all_downsets_and_more_devices():
    check_branches("b4x8", False, ".json", (8, 16, 32))


def check_branches(name, linear, ending, devices):
    graph = profile(name + ending)
    for k, printed in zip((4, 8, 16, 32), PIPER_BRANCHES[name, linear], strict=True):
        if k in devices:
            plan = published_plan(graph, k, linear=linear, **BRANCHES)
            stages = [(stage.ops, stage.replicas) for stage in plan.stages]
            assert agrees(plan.value_s, printed), k
            assert piper_s(graph, stages, 25e9, 64) == pytest.approx(plan.value_s, rel=1e-9)
            assert piper_bytes(graph, stages) <= 16e9


def test_memory_pressure_as_measured_with_the_released_planner():
    """Two branches of 16 on 8 devices; at 0.8 GB operators 0, 2, 3, 8, 14 and 22 are recomputed."""
    graph = profile("b2x16.piper.json")
    for limit, printed in ((3, ".06423"), (2, ".06658"), (1.5, ".06888"), (1.2, ".07134"), (1, ".07891"), (0.8, ".08454")):
        assert agrees(published_plan(graph, 8, **{**BRANCHES, "memory_bytes": limit * 1e9}).value_s, printed)


def test_more_downsets_than_published_are_refused():
    with pytest.raises(Infeasible, match="40,000 downsets"):
        published_plan(towers(4, 16, fork=True), 4, **BRANCHES)


def test_knapsack_changes_the_cheapest_bytes_first():
    added, saved = np.array([1.0, 1.0, 4.0, 0.0]), np.array([1.0, 2.0, 8.0, 0.0])
    order = changes(added, saved)
    assert order.tolist() == [1, 2, 0]
    members = np.array([[True, True, True, True], [True, False, False, True]])
    for lacking, seconds, ops in ((1.5, 1.0, (1,)), (2.5, 5.0, (1, 2)), (11.0, 6.0, (0, 1, 2))):
        found = squeeze(members, np.zeros(2), np.full(2, lacking), [1], added, saved, np.zeros(4))
        assert found[0, 0] == seconds and changed([0, 1, 2, 3], lacking, order, saved) == ops
        assert found[0, 1] == np.inf
    assert squeeze(members, np.zeros(2), np.full(2, -1.0), [1], added, saved, np.zeros(4)).tolist() == [[0.0, 0.0]]


PLANNERS = (Piper(), Piper(linearize="always"), Piper(replication=False))


@pytest.mark.parametrize("seed", range(25))
def test_plans_are_valid_chains(seed):
    problem = random_problem(seed, max_ops=12, max_devices=6)
    for planner in PLANNERS:
        found = run(planner, problem)
        if found is not None:
            plan, seconds = found
            assert all((s, s + 1) in plan.edges for s in range(len(plan.stages) - 1))
            assert plan.explanation[0].startswith("own objective") and seconds > 0
            assert not any(stage.recompute for stage in plan.stages)


@pytest.mark.parametrize("seed", range(12))
def test_objective_is_the_best_of_all_chains(seed):
    """Against a plain enumeration of all intervals, replicas and depths."""
    problem = random_problem(seed, max_ops=6, max_devices=4, series_parallel=True)
    if problem.cluster.num_devices > problem.graph.num_ops:
        return
    planner = Piper(linearize="always")
    from gpp.planners.chains.downsets import Budget
    from gpp.planners.chains.piper import _Search
    from gpp.planners.common.linear_orders import depth_first_order

    search = _Search(problem, planner, Budget("x", 60, 1e9), 1.0)
    order = depth_first_order(problem.graph)
    for b in problem.microbatch_sizes():
        found = search.find(b)
        best = min((value for value in _all_chains(problem, order, b, search) if value is not None), default=None)
        assert (found is None) == (best is None)
        if found:
            assert found[0] == pytest.approx(best, rel=1e-9)


def _all_chains(problem, order, b, search):
    graph, n, count = problem.graph, len(order), problem.minibatch_size // b
    for size in range(1, min(problem.cluster.num_devices, n) + 1):
        for inner in itertools.combinations(range(1, n), size - 1):
            cuts = [0, *inner, n]
            parts = [tuple(sorted(order[i:j])) for i, j in itertools.pairwise(cuts)]
            for counts in itertools.product(search.counts(b), repeat=size):
                if sum(counts) <= problem.cluster.num_devices:
                    yield _value(problem, graph, parts, counts, b, count, search.link)


def _value(problem, graph, parts, counts, b, count, link):
    worst = 0.0
    for s, (ops, r) in enumerate(zip(parts, counts, strict=True)):
        held = min(len(parts) - s, count) * b
        if peak_bytes(problem, ops, b, r, held) > problem.memory_limit_bytes:
            return None
        forward, backward = problem.stage_times(ops, b, tuple(range(r)))
        moved = 0.0
        for tensor in graph.tensors:
            made, read = tensor.producer in ops, set(tensor.consumers) & set(ops)
            if (made and set(tensor.consumers) - set(ops)) or (not made and read):
                moved += tensor.bytes_per_sample * (1 + tensor.differentiable)
        finish = ring_s(problem, problem.trainable_bytes(ops), r) + problem.cost.update_s(
            problem.trainable_bytes(ops), problem.cluster.devices[0]
        )
        worst = max(worst, forward + backward + moved * b / r / link.bandwidth_bytes_per_s + finish / count)
    return worst


def test_tensor_parallel_degrees_are_used_where_they_are_declared():
    """BERT's layers declare 1, 2, 4 and 8; a stage that is split has them all."""
    graph = profile("piper_bert32a100.json")
    problem = Problem(
        graph=graph,
        cluster=flat(num_devices=8, bandwidth_bytes_per_s=25e9, memory_bytes=16e9),
        cost=Tabulated(),
        minibatch_size=8,
        microbatch_size=1,
        optimizer_state_factor=2.0,
    )
    without, _ = run(Piper(tensor_parallel=False), problem)
    assert all(stage.tensor_parallel == 1 for stage in without.stages)
    plan, seconds = run(Piper(), problem)
    assert any(stage.tensor_parallel > 1 for stage in plan.stages)
    strategy = Strategy(name="test", planner=Piper(), schedule=OneFOneB())
    assert strategy.predict(plan, problem).metrics.iteration_s == pytest.approx(seconds)


def test_compatible_plans_the_released_planners_plan():
    graph = profile("b2x16.piper.json")
    problem = Problem(
        graph=graph,
        cluster=flat(num_devices=8, bandwidth_bytes_per_s=25e9, memory_bytes=16e9),
        cost=Tabulated(),
        minibatch_size=64,
    )
    plan, _ = run(Piper(compatible=True), problem)
    assert "0.0642287 s" in plan.explanation[0]
    published = published_plan(graph, 8, **BRANCHES)
    assert [(stage.ops, len(stage.devices)) for stage in plan.stages] == [(s.ops, s.replicas) for s in published.stages]


def test_linearises_where_the_released_planner_stops():
    problem = Problem(graph=towers(4, 14, fork=True), cluster=cluster(4), cost=Constant(fixed_s=0.1), minibatch_size=8)
    with pytest.raises(Infeasible, match="40,000 downsets"):
        Piper(linearize="never").plan(problem, lambda plan: pytest.fail("nothing to predict"))
    plan, _ = run(Piper(), problem)
    assert "one depth-first order (the graph itself has more than" in plan.explanation[0]


def test_infeasible_says_what_would_fit():
    problem = Problem(graph=towers(2, 3, saved=1000.0), cluster=cluster(3, 900.0), cost=Constant(), minibatch_size=8)
    with pytest.raises(Infeasible, match="even the plan that needs least memory") as caught:
        Piper().plan(problem, lambda plan: pytest.fail("nothing to predict"))
    enough = float(caught.value.remedy.split("memory_bytes=")[1].split(")")[0])
    assert run(Piper(), replace(problem, cluster=cluster(3, enough * 1.001))) is not None


@pytest.mark.parametrize("field", ["linearize", "time_limit_s", "max_states"])
def test_settings_are_checked(field):
    with pytest.raises(InvalidConfig, match=f"strategy.planner.{field}"):
        Piper(**{field: "deep" if field == "linearize" else 0})
