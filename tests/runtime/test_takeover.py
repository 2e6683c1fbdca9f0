"""A training that takes over other plans between its steps; `python -m tests.checks.replanning` tries random ones."""

import gc
import random
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gpp import DoubleBuffer, Flush, PipeOptim
from gpp.runtime.checkpoint.moves import Move, moved_bytes, moves
from gpp.runtime.stretches import stretch_at
from gpp.runtime.worker.worker import Worker
from gpp.weights.base import AbstractWeights
from tests.checks.replanning import EVERY, STEPS, random_jobs
from tests.support import switches


@pytest.mark.parametrize(
    ("network", "policy", "dtype", "seed"),
    [
        ("NormedBatch", Flush(), "float32", 11),  # buffers that replicas hold differently, shared state
        pytest.param("Dropping", Flush(), "float64", 2, marks=pytest.mark.long),
        pytest.param("Tied", DoubleBuffer(), "float64", 2, marks=pytest.mark.long),
        pytest.param("Skip", PipeOptim(), "float32", 2, marks=pytest.mark.long),
    ],
)
def test_a_training_that_moves_layers_is_equal_to_a_resumed_one(
    network: str, policy: AbstractWeights, dtype: str, seed: int, tmp_path: Path
) -> None:
    jobs, weights = random_jobs(network, policy, dtype, random.Random(seed))
    live = switches.train(jobs[0], tmp_path / "live", weights, jobs[1:])
    assert not switches.differences(live, switches.through_checkpoints(jobs, tmp_path / "disk", weights))
    world = jobs[0].plan.num_devices
    assert sorted((line["switched"], line["step"]) for line in live[2]) == [(0, EVERY)] * world + [(1, 2 * EVERY)] * world
    assert sum(line["bytes"] for line in live[2]) > 0 and len(live[0]) == STEPS


def test_what_is_sent() -> None:
    jobs, _ = random_jobs("Chain4", Flush(), "float64", random.Random(5))
    first, second = jobs[:2]
    assert moves(first, first) == ()
    held = [
        {device: {name for s in own for op in job.plan.stages[s].ops for name in job.graph.ops[op].params} for device, own in of}
        for job, of in ((job, job.plan.stages_of_device.items()) for job in (first, second))
    ]
    sent = moves(first, second)
    assert sent and all(move.name in held[0][move.source] for move in sent)
    got = {(move.destination, move.name) for move in sent}
    for device, names in held[1].items():
        lacking = {(device, name) for name in names - held[0][device]}
        assert lacking <= got, "a device lacks a parameter"
    whole = {name: param.num_bytes for name, param in first.graph.param_of.items()}
    move = Move(sent[0].name, 0, 1, True)
    assert moved_bytes(first, [move, move._replace(state=False)], 2.0) == {(0, 1): 4.0 * whole[move.name]}


def test_only_an_announced_plan_is_taken_and_none_after_the_last_step(tmp_path: Path) -> None:
    jobs, weights = random_jobs("Fork", Flush(), "float64", random.Random(4))
    short = [replace(job, settings=replace(job.settings, steps=EVERY)) for job in jobs]
    _, _, switched = switches.train(short[0], tmp_path / "last", weights, short[1:])
    assert switched == []
    alone = switches.train(jobs[0], tmp_path / "alone", weights)
    assert alone[2] == [] and len(alone[0]) == STEPS
    # A plan that is the present one changes nothing, to the last bit, and sends nothing.
    same = switches.train(jobs[0], tmp_path / "same", weights, jobs[:1])
    assert not switches.differences(alone, same) and sum(line["bytes"] for line in same[2]) == 0


def test_the_worker_of_a_plan_that_was_replaced_holds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs, weights = random_jobs("Chain4", Flush(), "float64", random.Random(5))
    held, train = list[tuple[Worker, int, list[weakref.ref[torch.Tensor]]]](), Worker.train

    def watched(worker: Worker, first: int, *rest: Any) -> None:
        held.append((worker, first, [weakref.ref(param) for param in worker.params.values()]))
        worker.rows.ahead()  # as a worker does that waits for its first message
        train(worker, first, *rest)

    monkeypatch.setattr(Worker, "train", watched)
    switches.train(jobs[0], tmp_path, weights, jobs[1:])
    gc.collect()
    alive = {first: sum(ref() is not None for _, at, refs in held if at == first for ref in refs) for _, first, _ in held}
    assert alive[0] == alive[EVERY] == 0 < alive[2 * EVERY], "this test holds all of the workers, as a process holds its first one"


def test_a_pipeline_drains_where_a_plan_may_take_over() -> None:
    jobs, _ = random_jobs("Chain4", DoubleBuffer(), "float64", random.Random(1))
    assert jobs[0].streams
    assert [stretch_at(jobs[0], step) for step in range(STEPS)] == [(0, 2), (0, 2), (2, 2), (2, 2), (4, 1)]
