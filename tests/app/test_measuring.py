"""What a run has gained: how many turns a budget allows, and what is said where it allows none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Self

import pytest

from gpp import Analytical, GraphPipe, OneFOneB, Progress, Sequential, Single, Strategy, local
from gpp.analysis.gains import CHAIN, ONE_DEVICE, Rival
from gpp.app import measuring
from gpp.cost.problem import Problem
from gpp.runtime.rehearsal.rehearse import DeviceTimes
from gpp.timeline import Metrics
from tests.support.graphs import chain


class Fake:
    """Rehearsals whose steps take so many seconds of a clock that nothing else moves."""

    def __init__(self, step_s: float, clock: list[float]) -> None:
        self.step_s, self.clock, self.steps = step_s, clock, list[int]()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def run(self, job: Any, weights: Any, *, predicted_s: float) -> tuple[DeviceTimes, ...]:
        self.steps.append(job.settings.steps)
        self.clock[0] += self.step_s * job.settings.steps
        zero: dict[str, Any] = {"forward_s": {}, "backward_s": {}, "update_s": 0.0, "sends": (), "passes": 1, "rest_s": 0.0}
        return (DeviceTimes(device=0, waited_s=0.0, step_s=self.step_s, **zero),)


PROBLEM = Problem(graph=chain(4), cluster=local(num_devices=2), cost=Analytical(), minibatch_size=16, microbatch_size=2)


def gains(
    monkeypatch: pytest.MonkeyPatch, predicted_s: float, step_s: float, budget_s: float = 15.0
) -> tuple[Any, Fake, list[str]]:
    """A plan and two rivals whose steps all take `step_s`, and were predicted to take `predicted_s`."""

    def planned(name: str, planner: Any) -> tuple[Strategy, Any]:
        strategy = Strategy(name=name, planner=planner, schedule=OneFOneB())
        return strategy, strategy.plan(PROBLEM)

    clock, said = [0.0], list[str]()
    monkeypatch.setattr(measuring, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    settings = SimpleNamespace(device_kind="cpu", steps=0)
    plan = planned("graphpipe", GraphPipe(replication=False))[1]
    job: Any = SimpleNamespace(plan=plan, program=SimpleNamespace(actions={0: (), 1: ()}), settings=settings)
    monkeypatch.setattr(
        measuring, "short", lambda job, steps: SimpleNamespace(settings=SimpleNamespace(device_kind="cpu", steps=steps))
    )
    rivals = []
    for name, planner in ((CHAIN, Sequential()), (ONE_DEVICE, Single())):
        strategy, own = planned(name, planner)
        rivals.append(Rival(name=name, strategy=strategy, plan=own, predicted_s=predicted_s))
    metrics = Metrics(
        iteration_s=predicted_s,
        throughput_samples_per_s=1.0,
        bubble_fraction=0.0,
        peak_memory_bytes={},
        communication_bytes=0,
        max_in_flight_samples={},
        weight_versions={},
    )
    fake: Any = Fake(step_s, clock)
    found = measuring.measured_gains(
        tuple(rivals),
        job,
        metrics,
        lambda rival: job,
        dict,
        rehearsals=fake,
        budget_s=budget_s,
        progress=Progress(say=lambda words: None, warn=said.append),
    )
    return found, fake, said


@pytest.mark.parametrize(
    ("predicted_s", "step_s", "turns", "steps"),
    [
        (0.01, 0.01, 3, 60),
        (0.3, 0.3, 3, 5),
        # The three steps together take 1.4 s: before, nothing was measured, and nothing was said.
        (0.48, 0.48, 3, 3),
        (0.8, 0.8, 2, 3),
        # They take five times as long as predicted, so there is no time for a third turn.
        (0.1, 0.5, 2, 8),
    ],
)
def test_turns_follow_from_the_budget(
    monkeypatch: pytest.MonkeyPatch, predicted_s: float, step_s: float, turns: int, steps: int
) -> None:
    found, fake, said = gains(monkeypatch, predicted_s, step_s)
    assert found.measured and found.rounds == turns and not said
    assert fake.steps == [steps] * 3 * turns
    assert all(gain.low == gain.high == pytest.approx(1.0) for gain in found.gains)


def test_what_is_not_measured_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    found, fake, (said,) = gains(monkeypatch, 2.0, 2.0)
    assert not found.measured and not fake.steps
    assert "2 turns of 3 steps of each plan take 36 s" in said and "baselines_s=36 measures it" in said
    assert gains(monkeypatch, 2.0, 2.0, budget_s=36.0)[0].measured
