"""What a run gained: factors of rounds, words that fit them, and why a plan is one stage."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpp import GraphPipe, OneFOneB, Single, Strategy
from gpp.analysis.gains import ONE_DEVICE, Gain, Gains, Rival, gain_of_rounds, predicted_gains, rivals
from gpp.analysis.one_stage import one_stage
from gpp.report.run.gain_words import gain_lines, one_stage_lines, pipeline_command
from tests.support.graphs import problem, two_towers, within

ALONE = Strategy(name="single", planner=Single(), schedule=OneFOneB())
RIVAL = Rival(name=ONE_DEVICE, strategy=ALONE, plan=None, predicted_s=1.0)


def test_turns_are_compared_pair_by_pair() -> None:
    # The machine slows down by ten between two turns: no ratio of a turn changes, those across turns would.
    gain = gain_of_rounds(RIVAL, [1.0, 10.0, 1.0], [1.2, 12.0, 1.3])
    assert gain.speedup == pytest.approx(1.2)
    assert (gain.low, gain.high) == (pytest.approx(1.2), pytest.approx(1.3))
    assert gain.surely_faster and not gain.surely_slower


@pytest.mark.parametrize(
    ("own", "rival", "words"),
    [
        ([0.1] * 3, [0.126] * 3, "26 % faster than one device (100 ms a step against 126 ms)"),
        ([0.1] * 3, [0.25] * 3, "2.50 times as fast as one device"),
        ([0.103] * 3, [0.1] * 3, "3 % slower than one device"),
        ([0.1] * 3, [0.09, 0.1, 0.11], "as fast as one device (100 ms a step against 100 ms, 0.900× to 1.10× by turns)"),
    ],
)
def test_what_was_measured_is_said_both_ways(own: list[float], rival: list[float], words: str) -> None:
    gain = gain_of_rounds(RIVAL, own, rival)
    found = Gains(gains=(gain,), measured=True, rounds=3, steps=4, taken=0.0, workers=2, cores=2, waits=0.2)
    lines = gain_lines(found)
    gained = rival[0] > own[0]
    assert lines[0].startswith("Gained (measured): " if gained else "Nothing gained (measured): ") and words in lines[0]
    assert ("larger models" in lines[1]) == (not gained)


def test_why_nothing_was_gained() -> None:
    lost = gain_of_rounds(RIVAL, [2.0], [1.0])
    base = Gains(gains=(lost,), measured=True, rounds=1, steps=4, taken=0.0, workers=4, cores=2, waits=0.2)
    assert len(gain_lines(replace(base, workers=1, waits=0.001))) == 2  # a device that never waits loses nothing by it
    assert "4 workers share 2 cores" in gain_lines(base)[1]
    assert "Other programs" in gain_lines(replace(base, taken=0.5))[1]
    assert "larger models" in gain_lines(replace(base, workers=2))[1]
    hoped = replace(base, workers=2, gains=(replace(lost, foreseen=1.4),))
    assert "The prediction was 1.40× as fast as one device" in gain_lines(hoped)[1]
    cut = replace(base, workers=2, work=1.69, pieces=(32, 256))
    assert "micro-batches of 32 samples, which compute for 69 % longer" in gain_lines(cut)[1]
    nothing = Gain(over=ONE_DEVICE, own_s=1.0, rival_s=None, reason="it does not fit.")
    assert gain_lines(Gains(gains=(nothing,))) == ["Nothing to compare with (predicted): one device has no plan (it does not fit)."]
    assert gain_lines(Gains(gains=())) == []


def test_equal_predictions_are_equal_but_for_rounding() -> None:
    equal = Gain(over=ONE_DEVICE, own_s=1.0, rival_s=1.0 + 1e-15, low=1.0 + 1e-15, high=1.0 + 1e-15)
    assert "as fast as one device" in gain_lines(Gains(gains=(equal,)))[0]
    assert " a request against " in gain_lines(Gains(gains=(equal,), one="request"))[0]


def test_one_device_has_a_plan_where_smaller_micro_batches_fit() -> None:
    free = problem(two_towers(3), 2, 4)
    whole, quarter = (ALONE.plan(replace(free, microbatch_size=b)) for b in (4, 1))
    least, most = (plan.device_memory(free, {0: plan.stages[0].in_flight})[0] for plan in (quarter, whole))
    assert least < most
    for memory, size in ((most, 4), (most - 1, 2), (least, 1), (least - 1, None)):
        (found,) = rivals(replace(ALONE, planner=GraphPipe()), within(free, memory), quarter, (), uncut=True)
        assert (found.plan.stages[0].microbatch_size if found.plan else None) == size
        assert size or "no plan found fits" in (found.reason or "")


def test_one_device_needs_no_micro_batches() -> None:
    posed = replace(problem(two_towers(3), 2, 4, fixed_s=0.5), microbatch_size=1)
    strategy = Strategy(name="graphpipe", planner=GraphPipe(), schedule=OneFOneB())
    plan = strategy.plan(posed)
    (found,) = rivals(strategy, posed, plan, (), uncut=True)
    assert found.plan is not None and found.plan.stages[0].microbatch_size == posed.minibatch_size
    predicted = strategy.predict(plan, posed).metrics
    (gain,) = predicted_gains((found,), plan, predicted).gains
    assert gain.speedup == pytest.approx(found.predicted_s / predicted.iteration_s)


def test_a_single_stage_is_compared_with_a_pipeline() -> None:
    posed = problem(two_towers(3), 2, 4)
    plan = ALONE.plan(posed)
    own = ALONE.predict(plan, posed).metrics
    found = one_stage(Strategy(name="graphpipe", planner=GraphPipe(), schedule=OneFOneB()), posed, plan, own)
    assert found is not None and len(found.pipeline.stages) > 1
    why, command = one_stage_lines(found, "python run.py strategy=data_parallel steps=3")
    assert "One stage on one device takes" in why and "memory is no limit" in why
    assert command.endswith(found.word)
    assert one_stage(ALONE, posed, found.pipeline, own) is None


def test_the_command_for_a_pipeline_drops_what_it_replaces() -> None:
    line = "gpp strategy=piper strategy.planner.replication=true model=digits"
    assert pipeline_command(line, "strategy=even") == "gpp model=digits strategy=even"
    assert pipeline_command("gpp a=1", "strategy.planner.replication=false") == "gpp a=1 strategy.planner.replication=false"
