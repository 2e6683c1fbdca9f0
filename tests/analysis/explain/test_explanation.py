"""Every number of an explanation comes from simulating or planning again."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from gpp import GraphPipe, OneFOneB, Sequential, Strategy
from gpp.analysis.explain.changes import is_chain, replicate_stages, split_stages, with_links, with_memory, with_twice_the_devices
from gpp.analysis.explain.explanation import Explanation, explain, stage_loads
from gpp.analysis.explain.what_if import PlanShape
from gpp.cost.problem import Problem
from gpp.errors import Infeasible
from gpp.plan.build import make_plan
from gpp.planners.bounds.lower_bound import lower_bound
from gpp.serialization import from_json, to_json
from tests.support.bills import peak_bytes
from tests.support.graphs import chain, problem
from tests.support.long import thinned
from tests.support.problems import random_problem

GRAPHPIPE = Strategy(name="graphpipe", planner=GraphPipe(), schedule=OneFOneB())
SEQUENTIAL = Strategy(name="sequential", planner=Sequential(), schedule=OneFOneB())


def explained(given: Problem, strategy: Strategy = GRAPHPIPE, **more) -> Explanation:
    plan = strategy.plan(given)
    return explain(plan, strategy.predict(plan, given), given, strategy, bound=lower_bound(given), **{"budget_s": math.inf, **more})


@pytest.mark.parametrize("seed", thinned(range(6), 6))
@pytest.mark.parametrize("strategy", [GRAPHPIPE, SEQUENTIAL], ids=lambda s: s.name)
def test_sensitivities_are_plans_of_changed_problems(strategy: Strategy, seed: int) -> None:
    given = random_problem(seed, max_ops=6, max_devices=3)
    try:
        found = explained(given, strategy)
    except Infeasible:
        return
    changes = {
        "twice the memory": with_memory(given.cluster, 2.0),
        "half the memory": with_memory(given.cluster, 0.5),
        "links twice as fast": with_links(given.cluster, 2.0),
        "twice the devices": with_twice_the_devices(given.cluster),
    }
    assert {w.change for w in found.sensitivities} == set(changes) and not found.left_out
    for what in found.sensitivities:
        other = replace(given, cluster=changes[what.change])
        try:
            plan = strategy.plan(other)
        except Infeasible as error:
            assert what.iteration_s is None and str(error) in what.reason and what.reason.startswith("does not fit")
            continue
        seconds = strategy.predict(plan, other, record=False).metrics.iteration_s
        assert what.how == "planned" and what.iteration_s == pytest.approx(seconds, rel=1e-12)
        assert what.speedup == pytest.approx(found.iteration_s / seconds)
        assert what.shape == PlanShape.of(plan)
    assert from_json(Explanation, to_json(found)) == found


@pytest.mark.parametrize("seed", thinned(range(30), 15))
def test_loads_bound_the_step_and_reliefs_are_valid(seed: int) -> None:
    given = random_problem(seed, max_ops=9, max_devices=5)
    try:
        found = explained(given, budget_s=0.0)
    except Infeasible:
        return
    assert all(load.seconds <= found.iteration_s * (1 + 1e-9) for load in found.loads)
    assert found.bottleneck.seconds == max(load.seconds for load in found.loads)
    assert sum(found.idle.values()) == pytest.approx(found.bubble_fraction, abs=1e-9)
    assert found.reliefs and all(what.how == "simulated" for what in found.reliefs)
    assert not found.sensitivities and not found.alternatives and "twice the memory" in found.left_out


def test_a_slow_stage_is_the_bottleneck_and_splitting_it_helps() -> None:
    given = problem(chain(4), 3, 16)
    plan = make_plan(given, "test", [(0b0001, 1), (0b0110, 1), (0b1000, 1)], 2)
    found = explain(plan, SEQUENTIAL.predict(plan, given), given, SEQUENTIAL, bound=lower_bound(given), replan=False)
    assert found.bottlenecks == (1,) and found.bottleneck.kind == "compute" and found.memory_speedup is None
    by_name = {what.change: what for what in found.reliefs}
    split = by_name["split s1 in two (1 more device)"]
    assert split.speedup and split.speedup > 1.5
    split_plan, larger = split_stages(plan, given, [1]) or pytest.fail("stage 1 has two operators")
    split_plan.validate(larger)
    assert [stage.ops for stage in split_plan.stages] == [(0,), (1,), (2,), (3,)]
    assert split.iteration_s == SEQUENTIAL.predict(split_plan, larger).metrics.iteration_s
    replicas, larger = replicate_stages(plan, given, [1]) or pytest.fail("micro-batches of two samples")
    replicas.validate(larger)
    assert by_name["replicate s1 (1 more device)"].iteration_s == SEQUENTIAL.predict(replicas, larger).metrics.iteration_s
    assert found.left_out == ("everything that needs planning: this plan was given, or planned for another engine",)


def test_one_operator_cannot_be_split_and_one_sample_not_be_shared() -> None:
    given = problem(chain(2), 2, 4)
    plan = make_plan(given, "test", [(0b01, 1), (0b10, 1)], 1)
    assert split_stages(plan, given, [0]) is None and replicate_stages(plan, given, [0]) is None


def test_a_chain_stays_a_chain_where_its_stages_are_split() -> None:
    given = random_problem(3, max_ops=10, max_devices=4, series_parallel=True)
    plan = SEQUENTIAL.plan(given)
    largest = max(range(len(plan.stages)), key=lambda s: len(plan.stages[s].ops))
    split = split_stages(plan, given, [largest])
    assert split is not None
    split[0].validate(split[1])
    assert is_chain(split[0], given.graph) >= is_chain(plan, given.graph)


def test_memory_is_named_where_it_limits() -> None:
    """Half of the memory that the best plan wants: micro-batches of the best size no longer fit."""
    given = problem(chain(4), 2, 16, fixed_s=4.0)
    best = GRAPHPIPE.plan(given)
    need = max(peak_bytes(given, s.ops, s.microbatch_size, len(s.devices), s.in_flight) for s in best.stages)
    found = explained(problem(chain(4), 2, 16, fixed_s=4.0, memory_bytes=need * 0.6))
    assert found.memory_speedup and found.memory_speedup > 1.02
    assert explained(given).memory_speedup is None


def test_each_stage_of_a_shared_device_has_its_own_load() -> None:
    """The first device runs the stages of 2 and of 1 operators, the second the one of 1; an operator takes 3 seconds."""
    given = problem(chain(4), 2, 4)
    parts = [(0b0011, 1), (0b0100, 1), (0b1000, 1)]
    plan = make_plan(given, "test", parts, 1, placement=[(0,), (1,), (0,)], ordered=True)
    loads = stage_loads(plan, SEQUENTIAL.predict(plan, given), given, SEQUENTIAL)
    assert [load.compute_s for load in loads] == pytest.approx([24.0, 12.0, 12.0])
