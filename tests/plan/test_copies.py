"""Copies of a pipeline, for models that run at one batch size only."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gpp
from gpp.errors import InvalidConfig
from gpp.graph.captured import Captured
from gpp.plan.copies import copied
from gpp.strategy import Strategy

STRATEGY = Strategy(name="graphpipe", planner=gpp.GraphPipe(), schedule=gpp.OneFOneB())


class OnlyThree(nn.Module):
    """A network that runs at three samples alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).view(3, 64)


@pytest.fixture(scope="module")
def captured() -> Captured:
    found = gpp.capture_model(OnlyThree(), {"x": torch.randn(3, 64)}, torch.zeros(3, 64), F.mse_loss)
    assert found.batch == 3
    return found


@pytest.mark.parametrize("devices", [1, 2, 4, 8, 32])
def test_every_replica_takes_micro_batches_of_the_captured_size(captured: Captured, devices: int) -> None:
    problem = gpp.problem(captured, gpp.local(num_devices=devices), minibatch_size=96)
    plan = STRATEGY.plan(problem)
    STRATEGY.check(plan, problem)
    assert {stage.microbatch_size // len(stage.replicas) for stage in plan.stages} == {3} and plan.minibatch_size == 96
    (copies,) = {len(stage.replicas) for stage in plan.stages}
    seconds = STRATEGY.predict(plan, problem).metrics.iteration_s
    assert seconds <= STRATEGY.predict(STRATEGY.plan(replace(problem, copies=False)), problem).metrics.iteration_s * (1 + 1e-9)
    assert any(f"{copies} copies of a pipeline" in line for line in plan.explanation) == (copies > 1)
    for stage in plan.stages:  # replica j of every stage is in copy j
        assert [device // (devices // copies) for device in stage.devices] == list(range(copies))


def test_a_copied_plan_has_each_copy_on_devices_of_its_own(captured: Captured) -> None:
    problem = gpp.problem(captured, gpp.local(num_devices=2), minibatch_size=12)
    two = gpp.Strategy(name="even", planner=gpp.Even(), schedule=gpp.OneFOneB()).plan(replace(problem, copies=False))
    wide = replace(problem, cluster=gpp.local(num_devices=6), minibatch_size=36)
    plan = copied(two, 3, 2)
    STRATEGY.check(plan, wide)
    assert [stage.devices for stage in plan.stages] == [(0, 2, 4), (1, 3, 5)]
    assert [stage.in_flight for stage in plan.stages] == [3 * stage.in_flight for stage in two.stages]


def test_sizes_that_do_not_fit_are_refused(captured: Captured) -> None:
    only = "must be 3, the only size that OnlyThree runs at"
    for minibatch_size, microbatch_size, rule in ((8, None, only), (12, 4, only), (8, 3, "must divide minibatch_size=8")):
        with pytest.raises(InvalidConfig, match=f"microbatch_size=.*: {rule}"):
            gpp.problem(captured, gpp.local(num_devices=2), minibatch_size=minibatch_size, microbatch_size=microbatch_size)
