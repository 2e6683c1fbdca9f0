"""Replicas that take whole micro-batches in turn: plans, programs, times and memory."""

import itertools
import json
import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from gpp import DoubleBuffer, Flush, GPipe, NoFlush, OneFOneB, PipeDream, Plan, Sequential, Stash, Strategy, VerticalSync
from gpp.app.forms import Forms
from gpp.cost.holding import EVERYTHING
from gpp.cost.problem import Problem
from gpp.cost.regime import Regime
from gpp.errors import Infeasible, InvalidConfig, InvalidFile, InvalidPlan
from gpp.mechanisms.round_robin.sharing import SHARING
from gpp.mechanisms.round_robin.stage import IN_TURN, RoundRobin
from gpp.plan.build import make_plan
from gpp.planners.base import AbstractPlanner
from gpp.program.lower import POSTED_AHEAD
from gpp.program.program import Program, check_program, reduce_groups
from gpp.program.steady_state import check_stream, of_length, window
from gpp.schedules.base import AbstractSchedule
from gpp.schedules.forward_only import ForwardOnly
from gpp.serialization import from_json, to_json
from gpp.simulate.recurrence import can_score
from gpp.simulate.simulator import max_in_flight, simulate
from tests.support.bills import peak_bytes
from tests.support.graphs import chain, diamond, graph, problem, with_weights
from tests.support.long import thinned
from tests.support.problems import random_problem
from tests.support.programs import lower


def endless(prob: Problem, counts: list[int], b: int | list[int] = 1, turns: list[bool] | None = None) -> Plan:
    """A plan for a pipeline that does not drain: stage s is operator s."""
    asynchronous = replace(prob, regime=Regime(weights=Stash(accumulation=None)))
    sharing = [IN_TURN if turn else None for turn in turns or [True] * len(counts)]
    return make_plan(asynchronous, "test", [(1 << op, n) for op, n in enumerate(counts)], b, sharing=sharing, ordered=True)


def random_plan(seed: int) -> tuple[Problem, Plan, AbstractSchedule]:
    """A DAG whose stages have 1, 2 or 3 replicas, many of which take turns, and micro-batches of several sizes."""
    rng = random.Random(seed)
    n, schedule = rng.randint(1, 6), rng.choice([OneFOneB(), GPipe(), NoFlush()])
    edges = [(a, b) for b in range(1, n) for a in rng.sample(range(b), k=min(b, rng.randint(1, 2)))]
    batch = rng.choice([12, 24, 36])
    prob = problem(with_weights(graph(n, edges)), 3 * n, batch, regime=Regime(holds=schedule.holds))
    sizes = [rng.choice([b for b in (1, 2, 3, 4, 6) if batch % b == 0]) for _ in range(n)]
    sizes = [sizes[0]] * n if rng.random() < 0.3 else sizes
    counts = [rng.choice([r for r in (1, 2, 3) if r <= b or batch // b % r == 0]) for b in sizes]
    turns = [r > 1 and batch // b % r == 0 and (r > b or rng.random() < 0.7) for r, b in zip(counts, sizes, strict=True)]
    if schedule.drains:
        parts, k = [(1 << op, r) for op, r in enumerate(counts)], rng.choice([1, 1, 2])
        sharing = [IN_TURN if turn else None for turn in turns]
        plan = make_plan(prob, "test", parts, sizes, sharing=sharing, k=k, ordered=True, chain=rng.random() < 0.3)
    else:
        plan = endless(prob, counts, sizes, turns)
    plan.validate(prob)
    return prob, plan, schedule


def program_of(plan: Plan, prob: Problem, schedule: AbstractSchedule) -> Program:
    return lower(plan, prob.graph, schedule, minibatches=1 if schedule.drains else window(plan, POSTED_AHEAD))


@pytest.mark.parametrize("seed", thinned(range(80), 4))
def test_programs_run_to_their_end_and_a_micro_batch_stays_on_its_replica(seed: int) -> None:
    prob, plan, schedule = random_plan(seed)
    program = program_of(plan, prob, schedule)
    check_program(program, reduce_groups(plan, prob.graph))
    assert Program.from_text(program.to_text()) == program
    simulate(program, plan, prob)
    for s, stage in enumerate(plan.stages):
        if stage.stride == 1:
            continue
        count = program.num_samples // stage.microbatch_size
        for kind in "FB":
            ran = [[a.microbatch for a in program.actions[d] if (a.kind, a.stage) == (kind, s)] for d in stage.devices]
            assert ran == [list(range(r, count, stage.stride)) for r in range(stage.stride)]
    check_program(lower(plan, prob.graph, ForwardOnly(), random.Random(seed).randint(1, 40)))


def test_the_random_plans_cover_what_can_be_planned() -> None:
    plans = [(plan, schedule) for _, plan, schedule in map(random_plan, range(80))]
    found = {(s.stride, type(schedule)) for plan, schedule in plans for s in plan.stages}
    assert found >= {(r, kind) for r in (2, 3) for kind in (OneFOneB, GPipe, NoFlush)}
    assert any({s.stride for s in plan.stages} >= {1, 2, 3} for plan, _ in plans)
    assert any(s.stride > s.microbatch_size for plan, _ in plans for s in plan.stages)
    assert any(
        len(s.devices) > 1 and s.stride == 1 for plan, _ in plans for s in plan.stages if any(t.stride > 1 for t in plan.stages)
    )
    assert any(
        a.stride > 1 and a.microbatch_size != b.microbatch_size for plan, _ in plans for a in plan.stages for b in plan.stages
    )


@pytest.mark.parametrize("seed", thinned(seed for seed in range(80) if not random_plan(seed)[2].drains))
def test_a_program_of_a_few_mini_batches_stands_for_any_number(seed: int) -> None:
    prob, plan, schedule = random_plan(seed)
    program = program_of(plan, prob, schedule)
    for n in (1, program.minibatches - 1, program.minibatches + 1, program.minibatches + 4):
        whole = lower(plan, prob.graph, schedule, minibatches=n)
        for device in program.actions:
            mine = list(of_length(program, plan, device, n))
            if n > program.minibatches:
                assert mine == list(whole.actions[device])
            # In a shorter pass receives are posted where they are in the longer one, which may be earlier.
            assert [a for a in mine if a.kind[0] != "R" or a.kind == "R"] == [
                a for a in whole.actions[device] if a.kind not in ("RF", "RB")
            ]
            assert sorted(mine) == sorted(whole.actions[device])
        made = {device: tuple(of_length(program, plan, device, n)) for device in program.actions}
        check_program(replace(whole, actions=made), reduce_groups(plan, prob.graph))


def published(counts: list[int]) -> list[int]:
    """Forwards ahead of each replica in PipeDream's runtime."""
    return [(sum(counts) - 1 - sum(counts[:s])) // replicas for s, replicas in enumerate(counts)]


@pytest.mark.parametrize("counts", [[2, 1, 1], [3, 1], [3, 2, 1, 1], [2, 2, 2], [1, 2], [1, 4], [4, 1], [1, 1, 3], [2, 1, 3]])
def test_warm_up_is_as_published_where_shares_come_out_even(counts: list[int]) -> None:
    plan = endless(problem(chain(len(counts)), sum(counts), 12), counts)
    orders = program_of(plan, problem(chain(len(counts)), sum(counts), 12), NoFlush()).actions
    for s, (stage, ahead) in enumerate(zip(plan.stages, published(counts), strict=True)):
        assert plan.position(s).warmup == ahead
        assert sum(counts[s:]) <= stage.in_flight < sum(counts[s:]) + stage.stride  # NOAM, in equal shares
        for device in stage.devices:
            kinds = [a.kind for a in orders[device] if a.kind in "FB"]
            assert kinds[: ahead + 2] == ["F"] * (ahead + 1) + ["B"]


def balanced(counts: list[int]) -> Problem:
    """A chain whose stage with R devices is R times as slow, so that each can finish a micro-batch every 3 seconds."""
    base = chain(len(counts))
    ops = [replace(op, forward_flops=n * 1.0, backward_flops=n * 2.0) for op, n in zip(base.ops, counts, strict=True)]
    return problem(replace(base, ops=tuple(ops)), sum(counts), 12)


@pytest.mark.parametrize("counts", thinned([list(c) for n in (2, 3) for c in itertools.product((1, 2, 3, 4), repeat=n)]))
def test_a_replicated_stage_keeps_the_pace_of_the_others(counts: list[int]) -> None:
    prob = balanced(counts)
    plan = endless(prob, counts)
    metrics = simulate(program_of(plan, prob, NoFlush()), plan, prob).metrics
    assert metrics.iteration_s == pytest.approx(12 * 3.0)
    assert metrics.bubble_fraction == pytest.approx(0.0, abs=1e-12)
    # With something to sum, the replica whose turn is first waits for the last one's, once an update.
    trained = replace(prob, graph=with_weights(prob.graph))
    plan = endless(trained, counts)
    period = simulate(program_of(plan, trained, NoFlush()), plan, trained).metrics.iteration_s
    assert 12 * 3.0 - 1e-9 <= period <= 12 * 3.0 + 3.0 * (max(counts) - 1) + 1e-9


def test_the_published_warm_up_would_starve_a_stage_in_the_middle() -> None:
    """Three replicas hold two micro-batches each, and the first stage lets five in: two replicas wait for their second."""
    counts = [1, 3, 1]
    prob = balanced(counts)
    plan = endless(prob, counts)
    assert [s.in_flight for s in plan.stages] == [7, 6, 1]
    few = replace(plan, stages=(replace(plan.stages[0], in_flight=1 + published(counts)[0]), *plan.stages[1:]))
    assert [few.position(s).warmup for s in range(3)] == published(counts) == [4, 1, 0]
    program = program_of(few, prob, NoFlush())
    check_program(program, reduce_groups(few, prob.graph))
    assert simulate(program, few, prob).metrics.iteration_s == pytest.approx(12 * 6.0)


def test_time_and_memory_are_those_of_whole_micro_batches() -> None:
    """Two devices, four samples in micro-batches of two, half a second a pass by itself, three saved bytes a sample."""
    prob = problem(chain(1, saved=3.0), 2, 4, fixed_s=0.5)
    parts = [(1, 2)]
    split, turns = (make_plan(prob, "test", parts, 2, sharing=way) for way in (None, IN_TURN))
    # A pass has 1 + 2 seconds a sample; split runs two of one sample each, turns one of two.
    times = [simulate(program_of(plan, prob, OneFOneB()), plan, prob).metrics for plan in (split, turns)]
    fixed = sum(prob.stage_times((0,), 1, (0,))) - 3.0
    assert fixed > 0
    assert [m.iteration_s for m in times] == [pytest.approx(2 * (3.0 + fixed)), pytest.approx(6.0 + fixed)]
    assert [plan.stages[0].in_flight for plan in (split, turns)] == [2, 4]
    assert [m.max_in_flight_samples for m in times] == [{0: 2}, {0: 4}]
    one, two = (peak_bytes(problem(chain(1, saved=3.0), 1, 4), (0,), b, 1, b) for b in (1, 2))
    assert [m.peak_memory_bytes for m in times] == [dict.fromkeys((0, 1), round(one)), dict.fromkeys((0, 1), round(two))]
    assert not can_score(turns, [1])


def test_a_share_is_rounded_up() -> None:
    """Four micro-batches are needed, by three replicas: two each."""
    prob = problem(chain(2), 4, 6)
    plan = endless(prob, [3, 1])
    assert plan.stages[0].in_flight == 6 and plan.stages[0].ahead == 2
    assert max_in_flight(program_of(plan, prob, NoFlush()), plan) == {0: 6, 1: 1}
    uneven = replace(plan, stages=(replace(plan.stages[0], in_flight=4), plan.stages[1]))
    with pytest.raises(InvalidPlan, match="in-flight 4 a multiple of it times 3"):
        uneven.validate(prob)


def test_what_cannot_be_dealt_out_is_refused() -> None:
    prob = problem(chain(1), 3, 8)
    plan = make_plan(prob, "test", [(1, 3)], 2, sharing=IN_TURN)
    with pytest.raises(InvalidPlan, match=r"3 replicas have .* the 4 of a mini-batch.*a multiple of 3.*mechanisms\.round_robin"):
        plan.validate(prob)
    forms: Any = SimpleNamespace(_job=SimpleNamespace(plan=plan, captured=SimpleNamespace(batch=None)))
    with pytest.raises(InvalidConfig, match=r"batch=7: must make a multiple of 3 micro-batches of 2.*replicas=split"):
        Forms._check_size(forms, 7)
    Forms._check_size(forms, 6)
    # More replicas than samples of a micro-batch are fine in turn, and none to split.
    turns = make_plan(problem(chain(1), 4, 8), "test", [(1, 4)], 2, sharing=IN_TURN)
    turns.validate(problem(chain(1), 4, 8))
    with pytest.raises(InvalidPlan, match="4 replicas share out"):
        replace(turns, stages=(turns.stages[0].without(RoundRobin),)).validate(problem(chain(1), 4, 8))


def test_a_plan_reads_back_equal_and_so_does_an_old_one() -> None:
    plan = endless(problem(chain(2), 3, 4), [2, 1], turns=[True, False])
    assert from_json(Plan, to_json(plan)) == plan
    written = json.loads(to_json(plan))
    assert [stage.pop("mechanisms", None) for stage in written["stages"]] == [{"round_robin": {"whole": True}}, None]
    split = from_json(Plan, json.dumps(written))
    assert [stage.stride for stage in split.stages] == [1, 1]
    for stage, turns in zip(written["stages"], (True, False), strict=True):
        stage["round_robin"] = turns
    assert from_json(Plan, json.dumps(written)) == plan
    written["stages"][0]["round_robin"] = "yes"
    with pytest.raises(InvalidFile, match="round_robin"):
        from_json(Plan, json.dumps(written))


def test_replicas_take_turns_where_replicas_divide_the_micro_batches() -> None:
    prob = problem(diamond(), 8, 12)
    plan = make_plan(prob, "test", [(1, 2), (2, 3), (4, 2), (8, 1)], [2, 3, 2, 2])
    found = SHARING.chosen(plan, prob)
    assert [s.stride for s in found.stages] == [2, 1, 2, 1]  # 4 micro-batches of 3 samples are no three equal shares
    assert found.explanation == (
        "stage 1: replicas split every micro-batch, as their number does not divide those of a mini-batch",
    )
    assert [s.in_flight for s in found.stages] == [
        s.in_flight
        for s in make_plan(
            prob, "test", [(1, 2), (2, 3), (4, 2), (8, 1)], [2, 3, 2, 2], sharing=[IN_TURN, None, IN_TURN, None]
        ).stages
    ]
    whole = SHARING.chosen(plan, replace(prob, regime=Regime(holds=EVERYTHING)))
    assert {s.in_flight for s in whole.stages} == {12}


def test_a_plan_splits_where_whole_micro_batches_do_not_fit() -> None:
    prob = problem(chain(1, saved=3.0), 2, 4)
    plan = make_plan(prob, "test", [(1, 2)], 2)
    turned = SHARING.chosen(plan, prob)
    need = max(turned.device_memory(prob, {0: 4}).values())
    assert need > max(plan.device_memory(prob, {0: 2}).values())
    enough, little = (problem(chain(1, saved=3.0), 2, 4, memory_bytes=amount) for amount in (need, need - 0.5))
    assert SHARING.chosen(plan, enough) == turned
    assert SHARING.chosen(plan, little) == replace(
        plan, explanation=("replicas split every micro-batch: whole ones in turn would need more memory than a device has",)
    )


ASYNCHRONOUS = {"planner": PipeDream(), "schedule": NoFlush(), "replicas": "round_robin"}


def slow_head() -> Problem:
    """Two operators on three devices, the first twice as slow: a plan with two devices for it is the best."""
    base = chain(2)
    head = replace(base.ops[0], forward_flops=2.0, backward_flops=4.0)
    return problem(replace(base, ops=(head, *base.ops[1:])), 3, 4)


def test_a_strategy_asks_for_round_robin() -> None:
    strategy = Strategy(name="test", weights=Stash(accumulation=2), **ASYNCHRONOUS)
    prob = slow_head()
    plan = strategy.plan(prob)
    assert [(len(s.devices), s.stride) for s in plan.stages] == [(2, 2), (1, 1)]
    assert [s.in_flight // s.microbatch_size for s in plan.stages] == [4, 1]
    assert strategy.predict(plan, prob).metrics.iteration_s == pytest.approx(12.0)
    # Judged as it runs, without its program's events too.
    assert strategy.predict(plan, prob, record=False).metrics == strategy.predict(plan, prob).metrics
    # Copies of the weights: two micro-batches of a replica are in flight, and each of its own makes an update.
    assert strategy.predict(plan, prob).metrics.weight_versions == {0: 2, 1: 1}


@pytest.mark.parametrize("planner", thinned([PipeDream(), Sequential()]), ids=lambda p: type(p).__name__)
def test_planners_plans_are_valid_in_turn(planner: AbstractPlanner) -> None:
    """Where splitting fits, the plan fits with turns or splits; it runs, and is predicted alike with and without events."""
    turned = 0
    for seed, schedule in itertools.product(range(20), (OneFOneB(), NoFlush())):
        weights = Flush() if schedule.drains else Stash(accumulation=4)
        prob = random_problem(seed, max_ops=8, max_devices=6)
        split = Strategy(name="split", planner=planner, schedule=schedule, weights=weights)
        try:
            split.plan(prob)
        except Infeasible:
            continue
        strategy = replace(split, replicas="round_robin")
        plan = strategy.plan(prob)
        strategy.lower(plan, prob)
        if any(stage.stride > 1 for stage in plan.stages):
            turned += 1
            assert strategy.predict(plan, prob, record=False).metrics == strategy.predict(plan, prob).metrics
    assert turned


def test_one_micro_batch_a_mini_batch_leaves_nothing_to_take_in_turn() -> None:
    strategy = Strategy(name="test", weights=Stash(accumulation=1), **ASYNCHRONOUS)
    with pytest.raises(
        InvalidConfig, match=r"strategy.replicas=round_robin.*strategy.weights.accumulation=2.*strategy.replicas=split"
    ):
        strategy.plan(slow_head())


def test_versions_that_differ_between_stages_are_refused() -> None:
    """Replicas that take turns look fewer micro-batches back than stages that see them all."""
    prob = problem(chain(3), 4, 4)
    plan = endless(prob, [2, 1, 1])
    with pytest.raises(InvalidConfig, match="stages 0 and 1 would use different versions"):
        check_stream(plan, prob.graph, VerticalSync(accumulation=4))
    check_stream(plan, prob.graph, DoubleBuffer())
    with pytest.raises(InvalidConfig, match="needs at least 2 micro-batches"):
        check_stream(replace(plan, minibatch_size=2), prob.graph, DoubleBuffer())
    # Without round robin, but of unequal sizes.
    with pytest.raises(InvalidConfig, match="stage 0 would use weights that it does not have yet: its forwards are 5 micro"):
        check_stream(endless(prob, [1, 1, 1], [1, 2, 2], [False] * 3), prob.graph, VerticalSync(accumulation=None))
    check_stream(endless(prob, [2, 2, 2]), prob.graph, VerticalSync(accumulation=4))
