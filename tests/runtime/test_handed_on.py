"""Tensors that a stage gets from another stage of its device, which has received them (`gpp.plan.carrying`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from baselines.reference.pipeline import run_reference
from gpp.mechanisms.marks.stage import Marks
from gpp.mechanisms.round_robin.stage import IN_TURN
from gpp.mechanisms.split_backward.schedules.zero_bubble_h1 import ZeroBubbleH1
from gpp.optimizers import SGD
from gpp.plan.build import make_plan
from gpp.schedules.base import AbstractSchedule
from gpp.schedules.gpipe import GPipe
from gpp.schedules.one_f_one_b import OneFOneB
from tests.support import inprocess
from tests.support.staged import DATA, captured, parts_of, problem_of

OPTIMIZER, STEPS = SGD(lr=0.2, momentum=0.9), 2
CASES: dict[str, tuple[Sequence[tuple[int, ...]], int | list[int], AbstractSchedule]] = {
    "interleaved": ([(0,), (1,), (0,), (1,), (1,), (0,)], 4, OneFOneB()),
    "one_reader_device": ([(0,), (1,), (1,), (1,), (1,), (0,)], 2, GPipe()),
    "replicas": ([(0,), (1, 2), (0,), (1, 2), (1, 2), (0,)], 4, OneFOneB()),
    "unequal": ([(0,), (1,), (0,), (1,), (1,), (0,)], [2, 4, 2, 8, 2, 4], OneFOneB()),
    "in_turn": ([(0,), (1, 2), (0,), (1, 2), (1, 2), (0,)], 4, OneFOneB()),
    "recomputed": ([(0,), (1,), (0,), (1,), (1,), (0,)], 4, OneFOneB()),
    "on_host": ([(0,), (1,), (0,), (1,), (1,), (0,)], 4, OneFOneB()),
    "split_backward": ([(0,), (1,), (0,), (1,), (1,), (0,)], 4, ZeroBubbleH1()),
}


@pytest.mark.parametrize("case", CASES)
def test_training_equals_one_device(case: str, tmp_path: Path) -> None:
    placement, size, schedule = CASES[case]
    model, found, weights = captured("Rereading")
    masks = parts_of(found.graph)
    problem = problem_of(found, schedule, 3)
    parts = [(mask, len(devices)) for mask, devices in zip(masks, placement, strict=True)]
    sharing = [IN_TURN if case == "in_turn" and len(devices) > 1 else None for devices in placement]
    plan = make_plan(problem, "test", parts, size, ordered=True, placement=placement, sharing=sharing)
    if case in ("recomputed", "on_host"):
        what = {"recomputed": "recompute", "on_host": "offload"}[case]
        stages = (stage.having(Marks(**{what: stage.ops})) if stage.devices == (1,) else stage for stage in plan.stages)
        plan = replace(plan, stages=tuple(stages))
    graph = problem.graph
    handed = {edge for edge, tensors in plan.carried(graph).items() if tensors != plan.edge_tensors(graph).get(edge)}
    assert any(plan.stages[s].devices == plan.stages[t].devices for s, t in handed)
    job = inprocess.make_job(
        found, problem, plan, schedule, model=model, data=DATA, optimizer=OPTIMIZER, steps=STEPS, dtype="float64", held_out=8
    )
    losses, state, _ = inprocess.run(job, tmp_path, weights)
    if case != "in_turn":  # which the reference does not follow
        assert losses == pytest.approx(run_reference(job, weights)[0], abs=1e-13)
    expected, params = inprocess.reference(model, DATA, OPTIMIZER, weights, steps=STEPS, minibatch_size=16, dtype="float64")
    assert losses == pytest.approx(expected, abs=1e-12)
    for name, tensor in params.items():
        torch.testing.assert_close(state[name], tensor, rtol=0, atol=1e-12)
