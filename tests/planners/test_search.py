"""The compiled search: what it times is what the simulator says, and its plain Python does the same."""

from __future__ import annotations

import functools
import operator
from array import array
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest

from gpp import GPipe, GraphPipe, OneFOneB, Plan, Strategy
from gpp.cost.overheads import Overheads
from gpp.cost.problem import Problem
from gpp.planners.base import PlainPrediction
from gpp.planners.common.candidates import Assessor
from gpp.planners.common.incumbent import Incumbent
from gpp.planners.common.stage_costs import StageCosts
from gpp.planners.search.climb import Climber
from gpp.planners.search.timers import Timers
from gpp.schedules import merge
from gpp.simulate import period
from gpp.timeline import Timeline
from tests.support.conf import option
from tests.support.graphs import cluster, problem, two_towers, within
from tests.support.long import thinned
from tests.support.problems import random_problem
from tests.support.twins import OVERHEADS, candidate, plain, plainly, plans, strategy_of, tight


@pytest.mark.parametrize("schedule", [OneFOneB(), GPipe()], ids=["1f1b", "gpipe"])
@pytest.mark.parametrize("overheads", [Overheads(), OVERHEADS], ids=["free", "overheads"])
@pytest.mark.parametrize("seed", thinned([16, *range(8)]))  # 16: few bytes are summed in another time than many, by another link
def test_a_timed_step_is_the_simulated_one(seed: int, overheads: Overheads, schedule: OneFOneB | GPipe) -> None:
    """Shared devices, replicas, chains with order-only edges, tensors without gradients, links that differ, norms over all devices:
    to the last digits."""
    prob = random_problem(seed, max_ops=9, max_devices=4).with_endless_memory
    if seed % 3 == 1:
        tensors = tuple(replace(tensor, differentiable=tensor.producer % 2 == 1) for tensor in prob.graph.tensors)
        prob = replace(prob, graph=replace(prob.graph, tensors=tensors))
    prob = replace(prob, overheads=overheads, global_norm=seed % 2 == 0)
    check_steps(prob, strategy_of(schedule), seed, 25)


def test_no_bound_counts_a_way_from_a_stage_behind() -> None:
    """A stage that gets a tensor from another stage of its device may stand before that one in the topological order."""
    prob = random_problem(189, max_ops=9, max_devices=6).with_endless_memory
    check_steps(replace(prob, overheads=OVERHEADS), strategy_of(OneFOneB()), 189, 60)


def check_steps(prob: Problem, strategy: Strategy, seed: int, count: int) -> None:
    """Drawn plans take what the simulator says, and none is dismissed whose step is hardly below what is asked for."""
    posed = strategy.posed(prob)
    assessor = Assessor(StageCosts(posed))
    timers = Timers(assessor.posed, 2 * posed.cluster.num_devices, plain=True)
    assert timers.exact
    compared = 0
    for number, (b, stage_of, devices, chain) in enumerate(plans(posed, seed, count)):
        found = candidate(assessor, b, stage_of, devices, chain)
        if found is None:
            continue
        incumbent = Incumbent(assessor, "test", lambda plan: strategy.predict(plan, prob, record=False))
        incumbent._timers.exact = False
        wanted = incumbent.simulate(found)
        assert wanted is not None
        _, room, timer = timers.of(b)
        room.devices[: len(devices)], room.stage_of[:] = array("q", devices), array("q", stage_of)
        if number % 2:
            assert timer.step_s(len(devices), wanted * (1 + 1e-6), chain) == pytest.approx(wanted, rel=1e-12), number
        assert timers.step_s(found.parts, found.placement, b, chain) == pytest.approx(wanted, rel=1e-12), number
        assert timer.step_s(len(devices), wanted * (1 - 1e-6), chain) == float("inf")
        compared += 1
    assert compared > 5


@pytest.mark.parametrize("seed", [0, 1, 3])  # 2 has one device
def test_a_walk_begins_at_a_plan_that_does_not_fit(seed: int) -> None:
    posed = strategy_of(OneFOneB()).posed(random_problem(seed, max_ops=8, max_devices=3))
    b = min(posed.microbatch_sizes())
    posed = tight(posed, b, 0.8)
    assessor, start = Assessor(StageCosts(posed)), ((0,) * posed.graph.num_ops, (1,))
    assert candidate(assessor, b, *start, False) is None
    found = Climber(*Timers(assessor.posed, 8, plain=False).of(b)).walk(start, seed, 0.1, 20_000)
    assert found
    assert all(candidate(assessor, b, stage_of, sets, False) for _, stage_of, sets in found)


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("memory", [1e15, 4e7])
@pytest.mark.parametrize("seed", range(4))
def test_a_walk_keeps_what_the_simulator_would(seed: int, memory: float, apart: bool) -> None:
    """Every plan that it hands on is one, fits, and takes as long as it says; the best comes first."""
    prob = within(random_problem(seed, max_ops=8, max_devices=3), memory)
    strategy = strategy_of(OneFOneB())
    assessor = Assessor(StageCosts(strategy.posed(prob)))
    b = min(prob.microbatch_sizes())
    walker = Climber(*Timers(assessor.posed, 8, plain=False).of(b))
    found = walker.walk(((0,) * prob.graph.num_ops, (1,)), seed, 0.1, 20_000, apart)
    assert not apart or all(sum(sets) == functools.reduce(operator.or_, sets) for *_, sets in found)
    assert [seconds for seconds, *_ in found] == sorted(seconds for seconds, *_ in found)
    for seconds, stage_of, sets in found:
        one = candidate(assessor, b, stage_of, sets, False)
        assert one is not None
        incumbent = Incumbent(assessor, "test", lambda plan: strategy.predict(plan, prob, record=False))
        incumbent._timers.exact = False
        assert seconds == pytest.approx(incumbent.simulate(one), rel=1e-12)


def test_a_plan_of_too_many_stages_is_no_start() -> None:
    """As layouts of many blocks of branches are on few devices; plain Python would say where it writes behind an array's end."""
    posed = strategy_of(OneFOneB()).posed(random_problem(1, max_ops=8, max_devices=2).with_endless_memory)
    assessor, ops = Assessor(StageCosts(posed)), posed.graph.num_ops
    for context in (nullcontext, plainly):
        with context():
            walker = Climber(*Timers(assessor.posed, ops - 1, plain=False).of(max(posed.microbatch_sizes())))
            assert walker.walk((tuple(range(ops)), (1,) * ops), 0, 0.1, 500) == []
            assert len(walker.walk(((0,) * ops, (1,)), 0, 0.1, 500)[0]) == 3


def test_periods_and_instants_are_those_of_the_simulator() -> None:
    own = plain()["gpp.planners.search.step"]
    assert (own.MOST, own.SAME, own.ROUNDING) == (period.MOST, period.SAME, merge.ROUNDING)
    assert plain()["gpp.planners.search.late"].SAME == period.SAME


def test_where_plans_are_not_timed() -> None:
    """Weights that stages share, and more devices than a set has bits, are the simulator's alone."""
    prob = problem(two_towers(2), 2, 8)
    posed = strategy_of(OneFOneB()).posed(prob)
    own = Assessor(StageCosts(posed))
    assert Timers(own.posed, 4, plain=True).exact and not Timers(own.posed, 4, plain=False).exact
    many = replace(posed, cluster=cluster(63))
    assert not Timers(own.posed._replace(problem=many), 4, plain=True).exact


def test_only_a_strategys_own_prediction_is_timed() -> None:
    """A search of a mechanism predicts other plans than those that it asks for; they all go to the simulator."""
    posed = strategy_of(OneFOneB()).posed(problem(two_towers(2), 2, 8))
    asked = list[Plan]()

    def predict(plan: Plan) -> Timeline:
        asked.append(plan)
        return strategy_of(OneFOneB()).predict(plan, posed, record=False)

    counts = list[int]()
    for own in (predict, PlainPrediction(predict)):
        asked.clear()
        found = GraphPipe(colocate="never").plan(posed, own)
        counts.append(len(asked))
        assert found.stages == GraphPipe(colocate="never").plan(posed, predict).stages
    assert counts[0] > counts[1] > 0


@pytest.mark.parametrize("name", ["sequential", "even", "data_parallel"])
def test_what_a_shipped_strategy_tries_is_timed_and_not_simulated(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    prob, strategy, asked = problem(two_towers(2), 2, 8), option("strategy", name), list[Plan]()
    predict = Strategy.predict

    def counting(self: Strategy, plan: Plan, *args: Any, **kwargs: Any) -> Timeline:
        asked.append(plan)
        return predict(self, plan, *args, **kwargs)

    monkeypatch.setattr(Strategy, "predict", counting)
    assert strategy.plan(prob).stages and not asked


def test_a_timed_plan_that_the_engine_cannot_run_is_not_chosen() -> None:
    prob, strategy = problem(two_towers(2), 2, 8), option("strategy", "sequential")

    def refused(plan: Plan) -> str | None:
        return "no replicas. Fix: none" if any(len(stage.devices) > 1 for stage in plan.stages) else None

    assert refused(strategy.plan(prob))
    assert not refused(strategy.plan(replace(prob, refuses=refused)))
