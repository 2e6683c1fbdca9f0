"""Schedules: properties of the orders, closed forms of their time, freedom from deadlock on random DAGs."""

import random
from dataclasses import replace

import pytest

from gpp import GPipe, OneFOneB
from gpp.cost.holding import EVERYTHING
from gpp.cost.regime import Regime
from gpp.errors import InvalidConfig, MalformedProgram
from gpp.plan.build import make_plan
from gpp.program.kinds import Action
from gpp.program.program import Program, check_program, reduce_groups
from gpp.schedules.base import StageSchedule
from gpp.simulate.simulator import simulate
from tests.support.graphs import chain, problem, two_towers
from tests.support.operations import calls
from tests.support.programs import lower

SCHEDULES = [OneFOneB(), GPipe()]


def plan_of(p, num_stages: int, b: int):
    return make_plan(p, "test", [(1 << op, 1) for op in range(num_stages)], b)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: type(s).__name__)
def test_each_forward_before_its_backward_in_order(schedule: StageSchedule) -> None:
    prob = problem(two_towers(3), 7, 12, regime=Regime(holds=schedule.holds))
    plan = plan_of(prob, 7, 2)
    for s in range(7):
        order = schedule.order(plan, s, 6)
        assert [m for kind, m in order if kind == "F"] == list(range(6))
        assert [m for kind, m in order if kind == "B"] == list(range(6))
        assert all(order.index(("F", m)) < order.index(("B", m)) for m in range(6))


def test_a_branch_shortens_warm_up() -> None:
    """Two towers of 4: depth 5 as a graph, 9 as a chain; the first stage holds that many micro-batches."""
    prob = problem(two_towers(4), 9, 32)
    parts = [(1 << op, 1) for op in range(9)]
    dag, line = make_plan(prob, "test", parts, 1), make_plan(prob, "test", parts, 1, chain=True)
    assert (dag.depth, line.depth) == (5, 9)
    times = {plan.depth: simulate(lower(plan, prob.graph, OneFOneB()), plan, prob).metrics for plan in (dag, line)}
    assert times[5].max_in_flight_samples[0] == 5
    assert times[9].max_in_flight_samples[0] == 9
    assert times[5].iteration_s == pytest.approx((32 + 4) * 3)
    assert times[9].iteration_s == pytest.approx((32 + 8) * 3)


def test_unequal_micro_batches_of_the_paper() -> None:
    """GraphPipe, Figure 5: micro-batches 1, 2, 4 need 10 samples in flight where a uniform 4 needs 12, and less time."""
    prob = problem(chain(3), 3, 16)
    parts = [(1 << op, 1) for op in range(3)]
    mixed, even = make_plan(prob, "test", parts, [1, 2, 4]), make_plan(prob, "test", parts, 4)
    runs = [simulate(lower(plan, prob.graph, OneFOneB()), plan, prob).metrics for plan in (mixed, even)]
    assert list(runs[0].max_in_flight_samples.values()) == [10, 8, 4]
    assert list(runs[1].max_in_flight_samples.values()) == [12, 8, 4]
    assert (runs[0].iteration_s, runs[1].iteration_s) == (66.0, 72.0)


def test_a_smaller_last_micro_batch_takes_less() -> None:
    """Five samples two by two on one device, and on two: 1 + 2 seconds a sample."""
    one = problem(chain(1), 1, 5)
    plan = make_plan(one, "test", [(1, 1)], 2)
    assert plan.stages[0].in_flight == 2
    assert simulate(lower(plan, one.graph, OneFOneB()), plan, one).metrics.iteration_s == pytest.approx(15.0)
    two = problem(chain(2), 2, 5, regime=Regime(holds=EVERYTHING))
    plan = make_plan(two, "test", [(1, 1), (2, 1)], 2)
    # The second stage computes from 2 to 17 without a pause; its first backward ends at 11, then the first stage's take 4, 4, 2.
    assert simulate(lower(plan, two.graph, GPipe()), plan, two).metrics.iteration_s == pytest.approx(21.0)


def test_a_deadlock_is_named_with_its_grid() -> None:
    program = Program(
        num_samples=1,
        actions={
            0: (Action("RB", 0, 0, 1, 1, 0, 1), Action("B", 0, 0), Action("F", 0, 0), Action("SF", 0, 0, 1, 1, 0, 1)),
            1: (Action("RF", 1, 0, 0, 0, 0, 1), Action("F", 1, 0), Action("B", 1, 0), Action("SB", 1, 0, 0, 0, 0, 1)),
        },
    )
    with pytest.raises(MalformedProgram, match=r"blocked: s0\.B0@d0, s1\.F0@d1") as info:
        check_program(program)
    assert ">>s0.B0@d0<<" in str(info.value)


def test_a_receive_without_its_send_is_named() -> None:
    program = Program(num_samples=1, actions={0: (Action("F", 0, 0),), 1: (Action("RF", 1, 0, 0, 0, 0, 1), Action("F", 1, 0))})
    with pytest.raises(MalformedProgram, match="0 sends against 1 receives"):
        check_program(program)


def test_an_edge_without_gradients_has_no_backward_traffic() -> None:
    base = chain(2)
    frozen = replace(base, tensors=(replace(base.tensors[0], differentiable=False),))
    prob = problem(frozen, 2, 4)
    plan = plan_of(prob, 2, 1)
    kinds = {a.kind for actions in lower(plan, frozen, OneFOneB()).actions.values() for a in actions}
    assert not kinds & {"SB", "RB"}


def test_simulating_32_stages_of_512_micro_batches_takes_a_few_calls_an_action() -> None:
    per_action = []
    for count in (64, 512):
        prob = problem(chain(32), 32, count)
        plan = plan_of(prob, 32, 1)
        program = lower(plan, prob.graph, OneFOneB())
        assert simulate(program, plan, prob).metrics.iteration_s == pytest.approx((count + 31) * 3)
        made = calls(lambda program=program, plan=plan, prob=prob: simulate(program, plan, prob))
        per_action.append(made / sum(map(len, program.actions.values())))
    # 6.4 as this is written. The last events of a device cost no more than the first.
    assert per_action[1] < 10 and per_action[1] < 1.1 * per_action[0]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: type(s).__name__)
@pytest.mark.parametrize("seeds", [range(12), pytest.param(range(12, 40), marks=pytest.mark.long)])
def test_stages_of_one_device_run_interleaved_without_deadlock(schedule: StageSchedule, seeds: range) -> None:
    """Random graphs, stages dealt out to fewer devices than there are stages, replicas among them."""
    for seed in seeds:
        rng = random.Random(seed)
        p = rng.choice([3, 4, 5])
        prob = problem(
            rng.choice([chain, two_towers])(2 * p) if seed % 2 else chain(2 * p), p, 8, regime=Regime(holds=schedule.holds)
        )
        num = prob.graph.num_ops
        where = [tuple(sorted(rng.sample(range(p), rng.choice([1, 1, 2])))) for _ in range(num)]
        sizes = [rng.choice([2, 4, 8]) for _ in range(num)]
        parts = [(1 << op, len(where[op])) for op in range(num)]
        plan = make_plan(prob, "test", parts, sizes, placement=where, ordered=True)
        program = lower(plan, prob.graph, schedule)
        check_program(program, reduce_groups(plan, prob.graph))
        for s, stage in enumerate(plan.stages):
            order = schedule.order(plan, s, 8 // stage.microbatch_size)
            for device in stage.devices:
                mine = [(a.kind, a.microbatch) for a in program.actions[device] if a.stage == s and a.kind in "FB"]
                assert mine == order
        timeline = simulate(program, plan, prob)
        busy = {d: sum(e.end_s - e.start_s for e in timeline.events if e.device == d and e.kind in "FB") for d in program.actions}
        assert timeline.metrics.iteration_s >= max(busy.values()) * (1 - 1e-9)


def test_interleaving_a_chain_fills_the_bubble() -> None:
    """Two rounds over two devices start the second device after a quarter of the model instead of after half of it."""
    prob = problem(chain(4), 2, 4)
    halves = make_plan(prob, "test", [(0b0011, 1), (0b1100, 1)], 1)
    quarters = make_plan(prob, "test", [(1 << op, 1) for op in range(4)], 1, placement=[(0,), (1,), (0,), (1,)], ordered=True)
    times = [simulate(lower(plan, prob.graph, GPipe()), plan, prob).metrics.iteration_s for plan in (halves, quarters)]
    assert times == [pytest.approx((4 + 1) * 6.0), pytest.approx((4 + 0.5) * 6.0)]
    own = [e for e in simulate(lower(quarters, prob.graph, GPipe()), quarters, prob).events if e.kind in ("SF", "SB")]
    assert {(e.stage, e.device) for e in own} == {(s, s % 2) for s in range(4)}


def test_the_global_norm_is_a_meeting_of_all_devices() -> None:
    prob = problem(chain(3), 3, 4, global_norm=True)
    plan = plan_of(prob, 3, 1)
    program = lower(plan, prob.graph, OneFOneB(), global_norm=True)
    check_program(program)
    assert all([a.kind for a in actions][-2:] == ["N", "U"] for actions in program.actions.values())
    assert Program.from_text(program.to_text()) == program
    ends = {e.end_s for e in simulate(program, plan, prob).events if e.kind == "N"}
    assert len(ends) == 1
    with pytest.raises(MalformedProgram, match="never reach"):
        check_program(Program(num_samples=4, actions={**program.actions, 2: program.actions[2][:-2]}))


def test_a_method_called_holds_is_refused_where_the_class_is_written() -> None:
    with pytest.raises(InvalidConfig, match=r"Mine: has a `holds` that is no Holding.*write holds = EVERYTHING"):
        type("Mine", (StageSchedule,), {"holds": lambda self, plan, stage: 1})
