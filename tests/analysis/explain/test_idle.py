"""Every instant of a device has one reason; together they are the step, and the idle ones the bubble."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpp import Even, GPipe, GraphPipe, OneFOneB, Sequential, Strategy
from gpp.analysis.explain.idle import REASONS, device_times, idle_shares
from gpp.cost.overheads import Overheads
from gpp.errors import Infeasible
from gpp.plan.build import make_plan
from gpp.report.draw.timelines import device_bubbles
from gpp.simulate.simulator import simulate
from gpp.timeline import Event, Metrics, Timeline
from tests.support.graphs import chain, problem
from tests.support.host import hosted
from tests.support.long import thinned
from tests.support.problems import random_problem

STRATEGIES = [
    Strategy(name="graphpipe", planner=GraphPipe(), schedule=OneFOneB()),
    Strategy(name="gpipe", planner=Sequential(), schedule=GPipe()),
    Strategy(name="even", planner=Even(), schedule=OneFOneB()),
]


@pytest.mark.parametrize("seed", thinned(range(25), 8))
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: s.name)
def test_the_reasons_add_up_to_the_step_and_to_the_bubble(strategy: Strategy, seed: int) -> None:
    given = random_problem(seed, max_ops=10, max_devices=6)
    if seed % 2:  # a machine whose runtime has been measured: what it takes for a pass is drawn in no pass
        given = replace(given, overheads=Overheads(forward_s=0.05, backward_s=0.1, message_s=0.02, step_s=0.3))
    try:
        plan = strategy.plan(given)
    except Infeasible:
        return
    timeline = strategy.predict(plan, given)
    devices = device_times(timeline, plan.stage_of_device, plan.beside_s(given))
    step = timeline.metrics.iteration_s
    assert [d.device for d in devices] == sorted(plan.stage_of_device)
    for device in devices:
        assert device.compute_s + sum(device.idle_s.values()) == pytest.approx(step, rel=1e-9)
        assert all(seconds >= 0 for seconds in device.idle_s.values())
    shares = idle_shares(devices, step)
    assert sum(shares.values()) == pytest.approx(timeline.metrics.bubble_fraction, abs=1e-9)
    assert (shares["runtime"] > 0) == bool(seed % 2)
    drawn = device_bubbles(timeline, list(plan.stage_of_device))
    assert all(drawn[d.device] == pytest.approx(1 - d.compute_s / step, abs=1e-9) for d in devices)
    if strategy.name == "gpipe":
        assert shares["data"] == shares["gradient"] == 0


def test_a_balanced_chain_only_fills_and_drains() -> None:
    """p equal stages, m micro-batches, links that cost nothing: (p - 1)(f + b) of ramps a device."""
    stages, count = 3, 8
    given = problem(chain(stages), stages, count)
    plan = make_plan(given, "test", [(1 << s, 1) for s in range(stages)], 1)
    strategy = STRATEGIES[2]
    devices = device_times(strategy.predict(plan, given), plan.stage_of_device, plan.beside_s(given))
    for s, device in enumerate(devices):
        assert device.compute_s == pytest.approx(3.0 * count)
        idle = {reason: device.idle_s[reason] for reason in REASONS}
        assert idle["fill"] + idle["drain"] == pytest.approx(3.0 * (stages - 1))
        # In, and the way to the sink and back.
        ahead = min(stages - s, count)
        assert idle["fill"] == pytest.approx(s + (stages - 1 - s) * 3 - (ahead - 1)), s


def test_each_kind_of_gap_has_its_reason() -> None:
    def event(device: int, kind: str, m: int, start: float, end: float) -> Event:
        return Event(device, kind, device, m, start, end)

    events = (
        *(event(0, "F", 0, 1, 2), event(0, "B", 0, 4, 5), event(0, "F", 1, 7, 8), event(0, "B", 1, 8, 9)),
        *(event(0, "SF", 0, 2, 3), event(0, "R", 0, 9, 13), event(0, "U", 0, 13, 14)),
        *(
            event(1, "F", 0, 0, 2),
            event(1, "B", 0, 2, 4),
            event(1, "F", 1, 4, 5),
            event(1, "B", 1, 6, 11),
            event(1, "R", 0, 11, 13),
        ),
    )
    metrics = Metrics(
        iteration_s=16,
        throughput_samples_per_s=1,
        bubble_fraction=1 - (4 + 10) / 32,
        peak_memory_bytes={},
        communication_bytes=0,
        max_in_flight_samples={},
        weight_versions={},
    )
    first, second = device_times(Timeline(source="x", metrics=metrics, events=events), {0: 0, 1: 1}, [(0.0, 0.0), (0.5, 0.0)])
    expected = {"runtime": 0, "host": 0, "fill": 3, "data": 2, "gradient": 0, "drain": 2, "peers": 2, "all_reduce": 2, "update": 1}
    assert first.idle_s == expected
    assert second.idle_s == dict.fromkeys(expected, 0) | {"runtime": 0.5, "drain": 3.5, "all_reduce": 2}
    assert sum(idle_shares((first, second), 16).values()) == pytest.approx(metrics.bubble_fraction)


@pytest.mark.parametrize("schedule", [OneFOneB(), GPipe()], ids=["1F1B", "GPipe"])
def test_a_device_that_waits_for_its_host_says_so(schedule) -> None:
    """Copies of 4 s: what a step is longer than without copies, stage 0 mostly waits for them; the others wait for stage 0."""
    program, plan, given = hosted(3, 8, 4.0, schedule)
    timeline = simulate(program, plan, given)
    first, *others = device_times(timeline, plan.stage_of_device, plan.beside_s(given))
    longer = timeline.metrics.iteration_s - simulate(*hosted(3, 8, 0.001, schedule)).metrics.iteration_s
    assert longer > 8 and first.idle_s["host"] > 0.8 * longer
    assert all(device.idle_s["host"] == 0 for device in others)
    for device in (first, *others):
        assert device.compute_s + sum(device.idle_s.values()) == pytest.approx(timeline.metrics.iteration_s)
