"""float16: one scale of the loss for all stages, and updates that all of them leave out together."""

import random
from pathlib import Path

import pytest
import torch

from gpp import SGD, OneFOneB
from gpp.data.synthetic import Synthetic
from gpp.graph.captured import Captured
from gpp.mechanisms.precision import worker as scaling
from gpp.mechanisms.precision.worker import ScaledLosses
from gpp.models.base import AbstractModel
from gpp.plan.build import make_plan
from gpp.program.kinds import NORM
from gpp.runtime.job import Job
from gpp.runtime.job_asked import with_asked
from gpp.runtime.worker.worker import Worker
from tests.support import inprocess
from tests.support.problems import random_partition
from tests.support.small import Small
from tests.support.training import loss_of

DATA = Synthetic(num_samples=16, num_test_samples=8)
OPTIMIZER = SGD(lr=0.0005, momentum=0.9)
STEPS = 12


def job_of(model: AbstractModel, cap: Captured, size: int = 4, **settings: object) -> Job:
    """Two branches on three devices."""
    problem = with_asked(inprocess.problem_of(cap, 3, 8), OPTIMIZER, {"autocast": "float16"})
    parts = [(mask, 1) for mask in random_partition(problem.graph, 3, random.Random(2))]
    plan = make_plan(problem, "test", parts, size)
    own = {"model": model, "data": DATA, "optimizer": OPTIMIZER, "steps": STEPS, "dtype": "float32", "autocast": "float16"}
    return inprocess.make_job(cap, problem, plan, OneFOneB(), **own | settings)


@pytest.fixture(scope="module")
def parts() -> tuple[AbstractModel, Captured, dict[str, torch.Tensor]]:
    model = Small(kind="Fork")
    return model, *inprocess.capture(model, "float32")


def scaled_by_torch(model: AbstractModel, weights: dict[str, torch.Tensor]) -> tuple[list[float], float]:
    """The same training on one device with PyTorch's own scaler: losses, and the scale at the end."""
    network = model.build().train()
    with torch.no_grad():
        for name, tensor in (*network.named_parameters(), *network.named_buffers()):
            if name in weights:
                tensor.copy_(weights[name])
    samples = DATA.load("train", model, seed=0, dtype="float32")
    optimizer = torch.optim.SGD(network.parameters(), lr=OPTIMIZER.lr, momentum=OPTIMIZER.momentum)
    scaler = torch.amp.GradScaler("cpu", init_scale=scaling.INITIAL, growth_interval=scaling.GROWTH_INTERVAL)
    losses = []
    for step in range(STEPS):
        with torch.autocast("cpu", dtype=torch.float16):
            value = loss_of(network, model, samples.fetch(inprocess.minibatch(step, 8, len(samples), 0)))
        optimizer.zero_grad()
        scaler.scale(value).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(value.item())
    return losses, scaler.get_scale()


def scale_of(worker: Worker) -> float:
    return next(hooks.scale for hooks in worker._hooks if isinstance(hooks, ScaledLosses))


@pytest.mark.parametrize("size", [8, 4])
def test_all_stages_leave_out_the_same_updates_as_pytorchs_scaler(
    size: int, parts: tuple[AbstractModel, Captured, dict[str, torch.Tensor]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, cap, weights = parts
    monkeypatch.setattr(scaling, "INITIAL", 2.0**18)
    monkeypatch.setattr(scaling, "GROWTH_INTERVAL", 4)
    job = job_of(model, cap, size)
    assert all(any(a.kind == NORM for a in actions) for actions in job.program.actions.values())
    losses, _, workers = inprocess.run(job, tmp_path, weights)
    expected, scale = scaled_by_torch(model, weights)
    assert len({scale_of(worker) for worker in workers}) == 1
    assert scale < 2.0**18  # some updates were left out
    # Gradients of half a mini-batch are half as large, so they may overflow later, and scales then grow at other steps.
    assert scale_of(workers[0]) / scale in ((1,) if size == 8 else (1, 2, 4))
    assert losses == pytest.approx(expected, rel=0.001 if size == 8 else 0.02)


def test_an_update_that_is_left_out_changes_nothing(
    parts: tuple[AbstractModel, Captured, dict[str, torch.Tensor]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, cap, weights = parts
    monkeypatch.setattr(scaling, "INITIAL", 2.0**120)
    job = job_of(model, cap, steps=3)
    _, state, workers = inprocess.run(job, tmp_path, weights)
    assert {scale_of(worker) for worker in workers} == {2.0**117}
    trained = {name for worker in workers for name, p in worker.params.items() if p.requires_grad}
    assert trained and all(torch.equal(state[name], weights[name]) for name in trained)


def test_a_resumed_run_goes_on_with_the_scale(
    parts: tuple[AbstractModel, Captured, dict[str, torch.Tensor]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, cap, weights = parts
    monkeypatch.setattr(scaling, "INITIAL", 2.0**18)
    whole, state, _ = inprocess.run(job_of(model, cap), tmp_path / "whole", weights)
    first = job_of(model, cap, steps=6, checkpoint_every=6)
    first.save(tmp_path / "first", weights)
    workers = inprocess.workers_of(first, tmp_path / "first")
    inprocess.in_threads([lambda w=w: [w.train(step, 1, lambda record: None) for step in range(6)] for w in workers])
    for worker in workers:
        worker.checkpoints.save(6)
    for worker in workers:
        worker.checkpoints.wait()
    folder = tmp_path / "first" / "checkpoints" / "step_6"
    rest, resumed, after = inprocess.run(job_of(model, cap, resume=str(folder), first_step=6), tmp_path / "rest", weights, first=6)
    assert rest == whole[6:]
    assert all(torch.equal(state[name], resumed[name]) for name in state)
    assert len({scale_of(worker) for worker in after}) == 1
