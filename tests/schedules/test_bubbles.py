"""Idle shares against their formulas: pipelines that drain after every mini-batch, and passes of any length that do not."""

from dataclasses import replace

import pytest

from gpp import DoubleBuffer, Even, GPipe, Naive, NoFlush, OneFOneB, PipeOptim, Plan, SpecTrain, Stash, Strategy
from gpp.cost.problem import Problem
from gpp.cost.regime import Regime
from gpp.mechanisms.weight_versions.vertical_sync import VerticalSync
from gpp.plan.build import make_plan
from gpp.program.kinds import COMPUTE
from gpp.program.program import Program, check_program, reduce_groups
from gpp.program.steady_state import of_length
from gpp.schedules.base import AbstractSchedule
from gpp.simulate.longest_path import LongestPath
from gpp.simulate.simulator import Costs, simulate
from gpp.weights.base import AbstractWeights
from tests.support.graphs import chain, problem, two_towers
from tests.support.programs import lower

PER_MICROBATCH = 3.0
"""Seconds of a forward (1) and a backward (2) of one sample at a stage."""


@pytest.mark.parametrize("schedule", [OneFOneB(), GPipe()], ids=lambda s: type(s).__name__)
@pytest.mark.parametrize(
    ("depth", "count", "percent"), [(4, 8, 27.27), (4, 16, 15.79), (8, 16, 30.43), (8, 64, 9.86), (1, 5, 0.0), (6, 3, 62.5)]
)
def test_a_pipeline_that_drains(schedule: AbstractSchedule, depth: int, count: int, percent: float) -> None:
    """(D - 1) / (N + D - 1), alike for GPipe and 1F1B; they differ in what is held: N micro-batches, or the distance to the end."""
    prob = problem(chain(depth), depth, count, regime=Regime(holds=schedule.holds))
    plan = make_plan(prob, "test", [(1 << op, 1) for op in range(depth)], 1)
    metrics = simulate(lower(plan, prob.graph, schedule), plan, prob).metrics
    assert metrics.iteration_s == pytest.approx((count + depth - 1) * PER_MICROBATCH)
    assert metrics.bubble_fraction == pytest.approx((depth - 1) / (count + depth - 1))
    assert 100 * metrics.bubble_fraction == pytest.approx(percent, abs=0.005)
    held = list(metrics.max_in_flight_samples.values())
    assert held == [count if isinstance(schedule, GPipe) else min(depth - k, count) for k in range(depth)]


@pytest.mark.parametrize("depth", [1, 2, 4, 7])
@pytest.mark.parametrize("minibatches", [1, 2, 3, 9, 18, 40, 200])
def test_a_pass_fills_and_drains_once(depth: int, minibatches: int) -> None:
    """(D - 1) / (n + D - 1) over n mini-batches of one micro-batch each: towards 0, whatever the depth."""
    prob = problem(chain(depth), depth, 1)
    plan = stream_plan(prob, [(1 << op, 1) for op in range(depth)])
    took, busy = pass_s(Stash(), plan, prob, minibatches)
    assert took == pytest.approx((minibatches + depth - 1) * PER_MICROBATCH)
    assert 1 - busy / (depth * took) == pytest.approx((depth - 1) / (minibatches + depth - 1))


@pytest.mark.parametrize(
    "weights", [Naive(), Stash(), VerticalSync(), DoubleBuffer(), SpecTrain(), PipeOptim()], ids=lambda w: w.name
)
@pytest.mark.parametrize("minibatches", [1, 3, 25])
def test_mini_batches_of_several_micro_batches(weights: AbstractWeights, minibatches: int) -> None:
    """n m micro-batches in a row: no policy makes a stage wait, as long as its weights are ready at once."""
    depth, count = 4, 6
    prob = problem(chain(depth), depth, count)
    plan = stream_plan(prob, [(1 << op, 1) for op in range(depth)])
    took, busy = pass_s(weights, plan, prob, minibatches)
    rounds = minibatches * count
    assert took == pytest.approx((rounds + depth - 1) * PER_MICROBATCH)
    assert 1 - busy / (depth * took) == pytest.approx((depth - 1) / (rounds + depth - 1))
    # One that drains after each pays for it n times.
    flush = Strategy(name="flush", planner=Even(), schedule=OneFOneB())
    each = flush.predict(plan, prob).metrics.iteration_s
    assert minibatches * each == pytest.approx(took + (minibatches - 1) * (depth - 1) * PER_MICROBATCH)


@pytest.mark.parametrize("minibatches", [1, 2, 30])
def test_branches_fill_as_fast_as_the_longest(minibatches: int) -> None:
    """Two towers of three and a join: D is the longest path, 4, not the seven stages."""
    prob = problem(two_towers(3), 7, 1)
    plan = stream_plan(prob, [(1 << op, 1) for op in range(7)])
    assert plan.depth == 4
    took, busy = pass_s(Stash(), plan, prob, minibatches)
    assert took == pytest.approx((minibatches + 3) * PER_MICROBATCH)
    assert 1 - busy / (7 * took) == pytest.approx(3 / (minibatches + 3))


def test_the_steady_step_has_no_bubble() -> None:
    """What a prediction says of a step is the pass without its ends."""
    prob = problem(chain(5), 5, 1)
    plan = stream_plan(prob, [(1 << op, 1) for op in range(5)])
    for record in (False, True):
        metrics = asynchronous(Stash()).predict(plan, prob, record=record).metrics
        assert metrics.iteration_s == pytest.approx(PER_MICROBATCH) and metrics.bubble_fraction == pytest.approx(0.0, abs=1e-9)
    long, _ = pass_s(Stash(), plan, prob, 1000)
    assert long / 1000 == pytest.approx(PER_MICROBATCH, rel=0.005)


def asynchronous(weights: AbstractWeights) -> Strategy:
    return Strategy(name="test", planner=Even(), schedule=NoFlush(), weights=weights)


def stream_plan(prob: Problem, parts: list[tuple[int, int]]) -> Plan:
    """Micro-batches of one sample; as many in flight as the pipeline is deep, also beyond one mini-batch."""
    plan = make_plan(replace(prob, minibatch_size=1000), "test", parts, 1)
    return replace(plan, minibatch_size=prob.minibatch_size)


def pass_s(weights: AbstractWeights, plan: Plan, prob: Problem, minibatches: int) -> tuple[float, float]:
    """Seconds of a whole pass, and device seconds of its forwards and backwards."""
    of = asynchronous(weights)
    of.check(plan, prob)
    known = of.lower(plan, prob)
    program = Program(
        num_samples=minibatches * plan.minibatch_size,
        actions={device: tuple(of_length(known, plan, device, minibatches)) for device in known.actions},
        minibatches=minibatches,
    )
    check_program(program, reduce_groups(plan, prob.graph))
    costs = Costs.of(program, plan, of.posed(prob))
    times, waits = LongestPath.of(program.waits, costs.seconds, costs.late).times(), program.waits
    busy = sum(count * costs.seconds[label] for label, count in waits.counts.items() if waits.labels[label][1].kind in COMPUTE)
    return max(times.free_s[: len(waits.devices)]), busy
