"""The real workers, one thread a device, over the fake transport: distributed logic without processes."""

from __future__ import annotations

import io
import json
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from gpp import Analytical, Device, Even, Link, Plan, Strategy, uniform
from gpp.app.capturing import captured_model
from gpp.capture.examples import capture_model, default_dtype, initial_weights
from gpp.capture.stage import build_stage
from gpp.cost.problem import Problem
from gpp.data.base import AbstractData
from gpp.data.digits import DigitsData
from gpp.data.sampler import minibatch
from gpp.data.synthetic import Synthetic
from gpp.graph.captured import Captured, is_loss
from gpp.graph.coarsen.coarsen import coarsen
from gpp.models.base import AbstractModel
from gpp.optimizers import AbstractOptimizer
from gpp.program.program import reduce_groups
from gpp.runtime.job import Job, WritesItself, assemble, restore
from gpp.runtime.stretches import stretch_at
from gpp.runtime.worker.main import course
from gpp.runtime.worker.seat import Seat, pass_seed
from gpp.runtime.worker.stage import StageRunner
from gpp.runtime.worker.worker import Worker
from gpp.schedules.base import AbstractSchedule
from tests.support.conf import model_named
from tests.support.fake_transport import FakeNetwork, FakeTransport
from tests.support.training import fit

CPU = Device(
    kind="cpu", memory_bytes=1e12, peak_flop_per_s={"float32": 1e11}, memory_bandwidth_bytes_per_s=1e10, kernel_latency_s=5e-6
)


def problem_of(captured: Captured, num_devices: int, minibatch_size: int, *, max_ops: int = 16, **more: Any) -> Problem:
    cluster = uniform(
        name="test",
        num_nodes=1,
        devices_per_node=num_devices,
        device=CPU,
        intra_node=Link(latency_s=5e-5, bandwidth_bytes_per_s=2e9),
    )
    return Problem(
        graph=coarsen(captured.graph, max_ops), cluster=cluster, cost=Analytical(), minibatch_size=minibatch_size, **more
    )


def make_job(captured: Captured, problem: Problem, plan: Plan, schedule: AbstractSchedule, **settings: Any) -> Job:
    """The job of a valid plan under a schedule; `settings` as of `job_under`."""
    plan.validate(problem)
    return job_under(Strategy(name="test", planner=Even(), schedule=schedule), captured, problem, plan, **settings)


def job_under(
    strategy: Strategy,
    captured: Captured,
    problem: Problem,
    plan: Plan,
    *,
    model: AbstractModel,
    data: AbstractData | None = None,
    optimizer: AbstractOptimizer,
    steps: int = 2,
    dtype: str = "float64",
    held_out: int = 0,
    **settings: Any,
) -> Job:
    """The job of a plan under a strategy.

    Args:
        data: `data_of` the model by default.
        settings: further ones of the job.
    """
    data = data or data_of(model)
    samples = {"train_samples": len(data.load("train", model, seed=0, dtype=dtype)), "evaluation_samples": held_out}
    own = {"optimizer": optimizer, "data": data, "model": model, "steps": steps, "dtype": dtype, "seed": 0}
    return assemble(captured, problem, plan, strategy, **own, **samples, **settings)


def workers_of(job: Job, run_dir: Path, device: str = "cpu") -> list[Worker]:
    """The workers of a job saved below `run_dir`, on one network."""
    job = Job.load(run_dir)
    network = FakeNetwork(reduce_groups(job.plan, job.graph), job.plan.num_devices)
    return [
        Worker(job, run_dir, Seat(device_id=d, device=torch.device(device), transport=FakeTransport(network, d)))
        for d in job.plan.devices
    ]


def run(
    job: Job, run_dir: Path, weights: dict[str, torch.Tensor] | WritesItself, device: str = "cpu", *, first: int = 0
) -> tuple[list[float], dict[str, torch.Tensor], list[Worker]]:
    """Train from step `first` on; returns the loss of every step, the final parameters and buffers, and the workers.

    Checkpoints are made as `course.run` makes them.
    """
    job.save(run_dir, weights)
    workers = workers_of(job, run_dir, device)
    # Summed in the order of the devices, not in that of their arrival.
    parts: dict[int, dict[int, float]] = defaultdict(dict)
    lock = threading.Lock()

    def train(worker: Worker) -> None:
        def log(record: dict[str, Any]) -> None:
            with lock:
                parts[record["step"]][worker.device_id] = sum(value for name, value in record.items() if is_loss(name))

        step = first
        while step < job.settings.steps:
            begin, count = stretch_at(job, step)
            worker.train(begin, count, log)
            step = begin + count
            if job.streams and worker.checkpoints.due(step):
                worker.checkpoints.save(step)

    with drawing_in_turn():
        in_threads([lambda w=w: train(w) for w in workers])
    state: dict[str, torch.Tensor] = {}
    for worker in workers:
        for module in worker.modules.values():
            state.update(module.state_dict())
    losses = [sum(own[device] for device in sorted(own)) for own in (parts[step] for step in range(first, job.settings.steps))]
    return losses, state, workers


def courses(workers: Sequence[Worker]) -> list[dict[str, Any]]:
    """The whole of every worker's run; all lines that they write."""
    outs = [io.StringIO() for _ in workers]
    in_threads([lambda w=w, out=out: course(w, out) for w, out in zip(workers, outs, strict=True)])
    return [json.loads(line) for out in outs for line in out.getvalue().splitlines()]


@contextmanager
def drawing_in_turn() -> Iterator[None]:
    """While the context lasts passes that draw random numbers run one after the other.

    All threads share one generator: nobody may draw between another's seeding and its draws. A backward draws again what its
    forward has drawn, where that was discarded.
    """
    lock = threading.Lock()
    calls = {name: getattr(StageRunner, name) for name in ("forward", "backward")}

    def alone(name: str) -> Any:
        def call(runner: StageRunner, *given: Any) -> Any:
            with lock if runner.module.has_random else nullcontext():
                return calls[name](runner, *given)

        return call

    with patch.multiple(StageRunner, **{name: alone(name) for name in calls}):
        yield


@contextmanager
def recorded_gradients() -> Iterator[Callable[[torch.Tensor], list[torch.Tensor]]]:
    """What optimizers see while the context lasts: parameter (or its state dict's tensor) -> its gradient of every step."""
    seen: dict[int, list[torch.Tensor]] = defaultdict(list)

    def note(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    seen[param.data_ptr()].append(param.grad.detach().clone())

    hook = register_optimizer_step_pre_hook(note)
    try:
        yield lambda tensor: seen.get(tensor.data_ptr(), [])
    finally:
        hook.remove()


def check_gradients(
    workers: list[Worker],
    params: dict[str, torch.Tensor],
    gradients: Callable[[torch.Tensor], list[torch.Tensor]],
    *,
    steps: int,
    within: float = 1e-8,
) -> None:
    """Every holder of a parameter has seen the reference's gradients in every step.

    Args:
        params: of the reference, by name.
        gradients: of `recorded_gradients`.
    """
    compared = 0
    for worker in workers:
        for module in worker.modules.values():
            for name, param in module.named_parameters():
                seen, expected = gradients(param), gradients(params[name])
                assert len(seen) == len(expected) == (steps if param.requires_grad else 0), name
                for mine, theirs in zip(seen, expected, strict=True):
                    torch.testing.assert_close(mine, theirs, rtol=0, atol=within, msg=lambda m, n=name: f"gradient of {n}: {m}")
                    compared += 1
    assert compared


def in_threads(calls: list[Callable[[], Any]]) -> list[Any]:
    """Run all calls at once; the first exception of any is raised."""
    results: list[Any] = [None] * len(calls)
    errors: list[BaseException] = []

    def guard(i: int) -> None:
        # A new thread has OpenMP's default until torch is asked: its first passes would add up in another order than its
        # later ones, and a training that goes on would differ in the last bit from the one that it goes on from.
        torch.get_num_threads()
        try:
            results[i] = calls[i]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guard, args=(i,), daemon=True) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads), "a worker hangs"
    return results


def reference(
    model: AbstractModel,
    data: AbstractData,
    optimizer: AbstractOptimizer,
    weights: dict[str, torch.Tensor],
    *,
    steps: int,
    minibatch_size: int,
    dtype: str = "float64",
    seed: int = 0,
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The same training on one device in plain PyTorch, whole mini-batches."""
    with default_dtype(dtype):
        network = model.build()
    with torch.no_grad():
        for name, tensor in (*network.named_parameters(), *network.named_buffers()):
            if name in weights:
                tensor.copy_(weights[name])
    samples = data.load("train", model, seed=seed, dtype=dtype)
    losses = fit(network, model, samples, optimizer, steps=steps, minibatch_size=minibatch_size, seed=seed)
    return losses, {name: t.detach() for name, t in network.named_parameters()}


def reference_of(job: Job, weights: dict[str, torch.Tensor]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The training of a job on one device in plain PyTorch."""
    own = job.settings
    model, data, optimizer = (restore(each) for each in (own.model, own.data, own.optimizer))
    settings = {"steps": own.steps, "minibatch_size": own.minibatch_size, "dtype": own.dtype, "seed": own.seed}
    return reference(model, data, optimizer, weights, **settings)


def staged_reference(job: Job, weights: dict[str, torch.Tensor]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The same training in one process and one autograd graph a step, cut and seeded as the plan says: for random operations."""
    plan, settings = job.plan, job.settings
    modules = []
    for stage in plan.stages:
        modules.append(build_stage(job.captured, [n for op in stage.ops for n in job.graph.ops[op].nodes], device="cpu"))
        modules[-1].load(weights)
    params = {name: param for module in modules for name, param in module.named_parameters()}
    optimizer, losses = restore(settings.optimizer).build([p for p in params.values() if p.requires_grad]), []
    samples = restore(settings.data).load("train", restore(settings.model), seed=settings.seed, dtype=settings.dtype)
    for step in range(settings.steps):
        values = samples.fetch(minibatch(step, settings.minibatch_size, len(samples), settings.seed))
        total = torch.zeros((), dtype=torch.float64)
        for s, (stage, module) in enumerate(zip(plan.stages, modules, strict=True)):
            made: dict[str, list[torch.Tensor]] = defaultdict(list)
            for piece in stage.pieces(settings.minibatch_size):
                torch.manual_seed(pass_seed(settings.seed, step, s, piece.microbatch, stage.devices.index(piece.device)))
                rows = {name: values[name][piece.lo : piece.hi] for name in (*module.inputs, *module.receives)}
                for name, value in module(piece.hi - piece.lo, rows).items():
                    if is_loss(name):
                        total = total + value * (piece.hi - piece.lo) / settings.minibatch_size
                    else:
                        assert module.spec(name).batch_dim == 0
                        made[name].append(value)
            values |= {name: torch.cat(parts) for name, parts in made.items()}
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        losses.append(total.item())
    return losses, {name: param.detach() for name, param in params.items()}


def capture(model: AbstractModel, dtype: str = "float64", seed: int = 0) -> tuple[Captured, dict[str, torch.Tensor]]:
    """The captured model, from the session's cache if a test or a run has captured it before, and its initial weights."""
    folder = os.environ.get("GPP_CACHE")
    captured = captured_model(model, dtype, folder, None, 4) if folder else capture_model(model, dtype=dtype)
    return captured, initial_weights(model, captured, seed=seed, dtype=dtype)


FEW_LAYERS = {
    "char_gpt_small": ("model.num_layers=2",),
    "clip_small": ("model.image_layers=1", "model.text_layers=1"),
    "digits": ("model.num_layers=2",),
    "digits_tasks": ("model.num_layers=1",),
    "gpt_small": ("model.num_layers=2",),
    "llava_small": ("model.image_layers=1", "model.num_layers=1"),
    "mmt_small": ("model.num_branches=2", "model.num_layers=1"),
    "pictured_small": ("model.image_layers=1", "model.num_layers=1"),
    "unet_small": ("model.attention=[false,false]",),
}
"""A capture takes a second for about twenty operators, and further layers are like the first ones."""


def few_layers(name: str, *overrides: str) -> tuple[str, ...]:
    """The settings with which `captured_named` builds a model, as words of a command line."""
    return (*FEW_LAYERS.get(name, ()), *overrides)


@cache
def captured_named(name: str, *overrides: str) -> tuple[AbstractModel, Captured, dict[str, torch.Tensor]]:
    """The model that `model=name` builds with few layers, captured in float64, and its weights; made once for all tests."""
    model = model_named(name, *few_layers(name, *overrides))
    return model, *capture(model)


def data_of(model: AbstractModel) -> AbstractData:
    """Its own digits, or whatever its inputs look like."""
    return DigitsData() if model.name.startswith("digits") else Synthetic(num_samples=64, num_test_samples=32)
