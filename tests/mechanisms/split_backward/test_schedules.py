"""Schedules that split backwards: their table, what they hold, and their programs."""

import random
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest

from baselines.deepspeed import DeepSpeed
from baselines.single import Single
from baselines.torch_pipelining import TorchPipelining
from gpp import SGD, Emulate, Even, Flush, GraphPipe, NoFlush, OneFOneB, Optimal, Plan, Split1F1B, Stash, Strategy
from gpp.cost.problem import Problem
from gpp.cost.regime import Regime
from gpp.errors import InvalidConfig, InvalidPlan, MalformedProgram
from gpp.mechanisms.round_robin.stage import IN_TURN
from gpp.mechanisms.split_backward.schedules.zero_bubble_h1 import ZeroBubbleH1
from gpp.mechanisms.split_backward.schedules.zero_bubble_h2 import ZeroBubbleH2
from gpp.plan.build import make_plan
from gpp.program.cards import check_cards
from gpp.program.held import device_peaks
from gpp.program.kinds import Action
from gpp.program.program import Program, check_program, reduce_groups
from gpp.runtime.engine import AbstractEngine
from gpp.runtime.job_asked import with_asked
from gpp.schedules.base import AbstractSchedule
from gpp.schedules.interleaved_1f1b import Interleaved1F1B
from gpp.simulate.simulator import simulate
from tests.oracle.passes import ends_of
from tests.oracle.split_orders import most_held, step_ends
from tests.support.graphs import chain, graph, problem, with_weights
from tests.support.long import thinned
from tests.support.programs import lower

SPLIT = (Split1F1B(), ZeroBubbleH1(), ZeroBubbleH2())
BEYOND: dict[str, Callable[[int, int, int], int]] = {
    "OneFOneB": lambda f, i, w: f + i + w,
    "Split1F1B": lambda f, i, w: f + i,
    "ZeroBubbleH1": lambda f, i, w: f + i - w,
    "ZeroBubbleH2": lambda f, i, w: f + i - 2 * w,
}
"""The table: seconds of a step beyond its work, for each stage of the depth but one."""
HELD: dict[str, Callable[[int, int], tuple[int, int]]] = {
    "Split1F1B": lambda h, depth: (h, h),
    "ZeroBubbleH1": lambda h, depth: (h, depth),
    "ZeroBubbleH2": lambda h, depth: (2 * h - 1, 2 * depth - 1),
}
"""The table: micro-batches held in full, and in all."""
TOWERS = [(2 * t, 2 * t + 1) for t in range(4)] + [(2 * t + 1, 8) for t in range(4)]
"""Four towers of two stages, and a join."""


def equal(schedule: AbstractSchedule, count: int, edges: list[tuple[int, int]], micro: int, took: tuple[int, int, int]):
    """Equal stages, one operator each: their program, plan and problem."""
    f, i, w = took
    of = with_weights(graph(count, edges, forward=f, backward=i + w, saved=5.0))
    of = replace(of, ops=tuple(replace(op, weight_flops=float(w), late_bytes=3.0) for op in of.ops))
    posed = problem(of, count, micro, regime=Regime(holds=schedule.holds))
    plan = make_plan(posed, "test", [(1 << op, 1) for op in range(count)], 1)
    program = lower(plan, of, schedule)
    check_program(program, reduce_groups(plan, of))
    return program, plan, posed


def check_table(
    schedule: AbstractSchedule, count: int, edges: list[tuple[int, int]], micro: int, took: tuple[int, int, int]
) -> None:
    program, plan, posed = equal(schedule, count, edges, micro, took)
    metrics = simulate(program, plan, posed).metrics
    work, name = micro * sum(took), type(schedule).__name__
    assert metrics.iteration_s - work == pytest.approx((plan.depth - 1) * BEYOND[name](*took), abs=1e-6)
    if name not in HELD:
        return
    orders = {s: [(a.kind, a.microbatch) for a in program.actions[s] if a.kind in "FIW"] for s in range(count)}
    ends = step_ends(orders, edges, dict(zip("FIW", took, strict=True)), 4)
    assert ends[3] - ends[2] == ends[2] - ends[1] == work + (plan.depth - 1) * BEYOND[name](*took)
    for s, h in enumerate(plan.distance_to_sink):
        full, held = HELD[name](h, plan.depth)
        assert metrics.max_in_flight_samples[s] == full == most_held(orders[s], Fraction(1), Fraction(0))
        assert most_held(orders[s], Fraction(1), Fraction(1)) == held
        own = posed.amounts(1 << s).held(1, 1)
        beside = most_held(orders[s], Fraction(own.microbatch), Fraction(own.late))
        assert metrics.peak_memory_bytes[s] == round(own.resident + float(beside))


@pytest.mark.parametrize("schedule", [OneFOneB(), *SPLIT], ids=lambda s: type(s).__name__)
@pytest.mark.parametrize("depth", [2, 4, 8])
@pytest.mark.parametrize("took", [(10, 10, 10), (10, 12, 7), (4, 20, 3)])
def test_the_table_on_chains(schedule: AbstractSchedule, depth: int, took: tuple[int, int, int]) -> None:
    for micro in (2 * depth - 1, 2 * depth + 2):
        check_table(schedule, depth, [(s, s + 1) for s in range(depth - 1)], micro, took)


@pytest.mark.parametrize("seed", thinned(range(34), 3))
def test_the_table_on_random_graphs(seed: int) -> None:
    """Any graph of equal stages with W <= F and W <= I, and 2 D - 1 micro-batches or more."""
    rng = random.Random(seed)
    for schedule in SPLIT:
        count = rng.randint(2, 9)
        edges = sorted({(a, b) for b in range(1, count) for a in rng.sample(range(b), min(b, rng.randint(0, 2)))})
        f, i = rng.randint(1, 20), rng.randint(1, 20)
        depth = equal(schedule, count, edges, 4, (f, i, 1))[1].depth
        check_table(schedule, count, edges, rng.randint(2 * depth - 1, 2 * depth + 4), (f, i, rng.randint(1, min(f, i))))


def test_the_first_stage_bounds_what_short_forwards_leave() -> None:
    """Where F < W, the first stage has no work for (D - 1) I after the forwards that it may hold: H1 takes that, and no less."""
    program, plan, posed = equal(ZeroBubbleH1(), 4, [(0, 1), (1, 2), (2, 3)], 12, (5, 9, 8))
    assert simulate(program, plan, posed).metrics.iteration_s == pytest.approx(12 * 22 + 3 * 9)


@pytest.mark.parametrize(("schedule", "beyond"), list(zip((OneFOneB(), *SPLIT), (60, 40, 20, 0), strict=True)))
def test_four_towers_and_a_join(schedule: AbstractSchedule, beyond: int) -> None:
    program, plan, posed = equal(schedule, 9, TOWERS, 16, (10, 10, 10))
    assert simulate(program, plan, posed).metrics.iteration_s == pytest.approx(16 * 30 + beyond)
    program, plan, posed = equal(OneFOneB(), 9, [(s, s + 1) for s in range(8)], 17, (10, 10, 10))
    assert simulate(program, plan, posed).metrics.iteration_s == pytest.approx(17 * 30 + 240)


def random_split(seed: int) -> tuple[AbstractSchedule, Problem, Plan, Program]:
    """Unequal stages, replicas that split or take turns, stages that are frozen or train nothing, micro-batches of two sizes."""
    rng = random.Random(seed)
    schedule, count = rng.choice(SPLIT), rng.randint(2, 6)
    edges = sorted({(a, b) for b in range(1, count) for a in rng.sample(range(b), rng.randint(1, min(b, 2)))})
    of = with_weights(graph(count, edges, forward=rng.randint(1, 9), backward=rng.randint(8, 20)))
    plain = {0} if rng.random() < 0.4 else {rng.randrange(count)} if rng.random() < 0.4 else set()
    ops = tuple(
        replace(op, params=()) if i in plain else replace(op, weight_flops=float(rng.randint(1, 8)), late_bytes=rng.random())
        for i, op in enumerate(of.ops)
    )
    tensors = tuple(replace(t, differentiable=not (t.producer == 0 and 0 in plain)) for t in of.tensors)
    names = {name for op in ops for name in op.params}
    of = replace(of, ops=ops, tensors=tensors, params=tuple(p for p in of.params if p.name in names))
    posed = problem(of, 3 * count, 24, regime=Regime(holds=schedule.holds))
    parts = [(1 << op, rng.choice([1, 1, 2, 3])) for op in range(count)]
    sizes = [rng.choice([3, 6]) for _ in parts]
    turns = [rng.random() < 0.4 and 24 // size % width == 0 for (_, width), size in zip(parts, sizes, strict=True)]
    plan = make_plan(posed, "test", parts, sizes, sharing=[IN_TURN if turn else None for turn in turns])
    return schedule, posed, plan, lower(plan, of, schedule)


@pytest.mark.parametrize("seed", range(12))
def test_random_programs_run_and_hold_what_is_said(seed: int) -> None:
    schedule, posed, plan, program = random_split(seed)
    groups = reduce_groups(plan, posed.graph)
    check_program(program, groups)
    assert Program.from_text(program.to_text()) == program
    assert simulate(program, plan, posed).metrics.iteration_s > 0
    bills = plan.bills(posed)
    for device, (s,) in plan.stages_of_device.items():
        kinds = {a.kind for a in program.actions[device]} & set("FBIW")
        halves = plan.has_weight_gradients(s, posed.graph)
        assert kinds == {"F"} | ({"I", "W"} if halves else {"B"} if plan.runs_backward(s, posed.graph) else set())
        # Sends backwards stand behind the pass that makes them, sums and the update behind the last.
        last = max((at for at, a in enumerate(program.actions[device]) if a.kind in "FBIW"), default=-1)
        assert all(at > last for at, a in enumerate(program.actions[device]) if a.kind in "RU")
        for at, action in enumerate(program.actions[device]):
            if action.kind == "SB":
                before = [a.kind for a in program.actions[device][:at] if a.kind not in ("SF", "SB", "RF", "RB")]
                assert before[-1] in "BI"
        if halves:
            memory = bills[s].memory
            order = [(a.kind, a.microbatch) for a in program.actions[device] if a.kind in "FIW"]
            held = most_held(order, Fraction(memory.microbatch), Fraction(memory.late))
            assert device_peaks(program, bills)[device] == pytest.approx(memory.resident + float(held))
    strategy = Strategy(name="test", planner=Even(), schedule=schedule)
    ordered = strategy.lower(plan, posed, cards=True)
    check_cards(ordered, plan, groups)


WRONG = {
    "a second half is missing": ("drop", "W3", r"s0\.I3@d0 is part of a pass, of which s0\.W3@d0 is missing"),
    "a first half is missing": ("drop", "I3", r"s0\.W3@d0"),
    "a second half before its first": ("first", "W2", r"blocked: s0\.W2@d0"),
    "one is whole": ("whole", "I5", r"s0\.B5@d0: stage 0 has others of these in parts"),
}


@pytest.mark.parametrize("name", WRONG)
def test_programs_of_wrong_halves_are_refused(name: str) -> None:
    change, word, message = WRONG[name]
    program, _, _ = equal(ZeroBubbleH1(), 2, [(0, 1)], 6, (1, 1, 1))
    own = list(program.actions[0])
    at = next(i for i, a in enumerate(own) if f"{a.kind}{a.microbatch}" == word)
    action = own.pop(at)
    if change == "first":
        own.insert(0, action)
    if change == "whole":
        own.insert(at, Action("B", action.stage, action.microbatch))
        own.remove(Action("W", action.stage, action.microbatch))
    with pytest.raises(MalformedProgram, match=message):
        check_program(replace(program, actions=program.actions | {0: tuple(own)}))


def test_what_split_schedules_cannot_give_is_refused() -> None:
    posed = problem(with_weights(chain(4)), 4, 8)
    own = Strategy(name="test", planner=GraphPipe(per_stage=True), schedule=ZeroBubbleH1())
    with pytest.raises(InvalidConfig, match=r"per_stage=true: .* set it to false"):
        own.plan(posed)
    with pytest.raises(InvalidConfig, match=r"per_stage=true: .*schedule=no_flush each .*strategy/weights=flush"):
        replace(own, schedule=NoFlush(), weights=Stash()).plan(posed)
    with pytest.raises(InvalidConfig, match=r"strategy.planner=optimal: .* whole backwards"):
        replace(own, planner=Optimal()).plan(posed)
    with pytest.raises(InvalidConfig, match=r"loss\.scope=minibatch"):
        replace(own, planner=Even()).plan(replace(posed, minibatch_ops=8))
    with pytest.raises(InvalidConfig, match=r"clip_scope=model.*zero_bubble_h1"):
        replace(own, planner=Even(), schedule=ZeroBubbleH2()).plan(replace(posed, global_norm=True))
    replace(own, planner=Even()).plan(replace(posed, global_norm=True))
    plan = make_plan(posed, "test", [(1 << op, 1) for op in range(4)], 1, k=2)
    with pytest.raises(InvalidPlan, match="needs k=1"):
        replace(own, planner=Even()).lower(plan, posed)


@pytest.mark.parametrize(
    ("asked", "autocast", "message"),
    [
        ({"clip_norm": 1.0}, None, r"optimizer\.clip_scope=model: .*Fix: set optimizer\.clip_scope=stage"),
        ({"log_gradient_norm": True}, None, r"optimizer\.log_gradient_norm=true: .*log_gradient_norm=false"),
        ({"clip_norm": 1.0, "clip_scope": "stage"}, "float16", r"engine\.autocast=float16: .*autocast=bfloat16"),
    ],
)
@pytest.mark.parametrize(
    ("order", "other"),
    [
        ({"schedule": ZeroBubbleH2()}, "strategy/schedule=zero_bubble_h1"),
        ({"schedule": NoFlush(), "weights": Stash()}, "never drains.*strategy/schedule=1f1b strategy/weights=flush"),
    ],
)
def test_a_norm_over_all_stages_is_refused_by_the_setting_that_needs_it(
    asked: dict[str, Any], autocast: str | None, message: str, order: dict[str, Any], other: str
) -> None:
    optimizer = SGD(lr=0.1, **asked)
    posed = with_asked(problem(with_weights(chain(4)), 4, 8), optimizer, {"autocast": autocast})
    with pytest.raises(InvalidConfig, match=f"(?=.*{message}).*{other}"):
        Strategy(name="test", planner=Even(), **order).plan(posed)


@pytest.mark.parametrize("engine", [TorchPipelining(), DeepSpeed(), Single()], ids=lambda engine: engine.name)
def test_engines_of_others_refuse_halves(engine: AbstractEngine) -> None:
    engine.refuse_settings(Flush(), SGD(lr=0.1, momentum=0.9), OneFOneB())
    with pytest.raises(InvalidConfig, match=r"strategy\.schedule.*runs backwards whole.*strategy/schedule=1f1b"):
        engine.refuse_settings(Flush(), SGD(lr=0.1, momentum=0.9), ZeroBubbleH1())
    Emulate().refuse_settings(Flush(), SGD(lr=0.1, momentum=0.9), ZeroBubbleH1())
    if engine.planner is not None:
        with pytest.raises(InvalidConfig, match=r"strategy\.schedule=interleaved_1f1b: .*in one piece"):
            engine.refuse_settings(Flush(), SGD(lr=0.1, momentum=0.9), Interleaved1F1B())


def test_a_plan_whose_late_bytes_do_not_fit_is_refused() -> None:
    """H1's last stage holds one micro-batch in full and D - 1 late: by the order of its passes, not by its samples in flight."""
    _, plan, posed = equal(ZeroBubbleH1(), 4, [(0, 1), (1, 2), (2, 3)], 8, (1, 1, 1))
    need = simulate(lower(plan, posed.graph, ZeroBubbleH1()), plan, posed).metrics.peak_memory_bytes
    strategy = Strategy(name="test", planner=Even(), schedule=ZeroBubbleH1())
    for memory, fits in ((max(need.values()), True), (max(need.values()) - 1, False)):
        devices = tuple(replace(device, memory_bytes=memory) for device in posed.cluster.devices)
        small = replace(posed, cluster=replace(posed.cluster, devices=devices))
        if fits:
            strategy.check(plan, small)
        else:
            with pytest.raises(Exception, match="bytes on a device"):
                strategy.check(plan, small)


def test_what_stages_of_one_device_hold_is_reckoned_together() -> None:
    """Two stages on each of two devices are not at their fullest at once: a plan fits that the sum of both would not."""
    of = with_weights(chain(4, forward=10.0, backward=20.0, saved=5.0))
    of = replace(of, ops=tuple(replace(op, weight_flops=10.0, late_bytes=3.0) for op in of.ops))
    schedule = ZeroBubbleH1()
    strategy = Strategy(name="test", planner=Even(), schedule=schedule)
    posed = strategy.posed(problem(of, 2, 8))
    plan = make_plan(posed, "test", [(1 << op, 1) for op in range(4)], 1, ordered=True, placement=[(0,), (1,), (0,), (1,)])
    need = max(strategy.predict(plan, posed).metrics.peak_memory_bytes.values())
    assert need < max(plan.device_memory(posed, {s: stage.in_flight for s, stage in enumerate(plan.stages)}).values())
    devices = tuple(replace(device, memory_bytes=need) for device in posed.cluster.devices)
    strategy.check(plan, replace(posed, cluster=replace(posed.cluster, devices=devices)))
    # Second halves fill what other passes leave free: no device waits but for the first gradients, and at the end.
    whole = lower(plan, of, OneFOneB(), bills=plan.bills(posed))
    halves = strategy.lower(plan, posed)
    assert simulate(halves, plan, posed).metrics.iteration_s < simulate(whole, plan, posed).metrics.iteration_s
    check_gaps({device: [action[:3] for action in own if action.kind in "FIW"] for device, own in halves.actions.items()})


def check_gaps(orders: dict[int, list[tuple[str, int, int]]]) -> None:
    """Equal passes of a chain of stages, two on each device: a second half starts only where the other stage could not go."""
    last = max(stage for own in orders.values() for _, stage, _ in own)

    def before(task: tuple[str, int, int]) -> list[tuple[str, int, int]]:
        kind, s, m = task
        return {"F": [("F", s - 1, m)] * (s > 0), "I": [("F", s, m), *[("I", s + 1, m)] * (s < last)], "W": [("I", s, m)]}[kind]

    ends = ends_of(orders.values(), lambda task: [(each, 0) for each in before(task)], lambda task: 1)
    assert ends is not None
    for own in orders.values():
        for place, task in enumerate(own):
            other = next((each for each in own[place:] if each[1] != task[1]), None)
            if task[0] == "W" and other is not None and other[0] != "W":
                came = max((ends[each] for each in before(other)), default=0)
                assert came > ends[task] - 1, (task, other)
