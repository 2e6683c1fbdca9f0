"""A training on stages, in threads, beside the same training on one device."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from gpp.cost.regime import Regime
from gpp.optimizers import SGD
from gpp.plan.build import make_plan
from gpp.runtime.job import Job
from gpp.runtime.worker.worker import Worker
from gpp.schedules.base import AbstractSchedule
from gpp.schedules.one_f_one_b import OneFOneB
from tests.support import inprocess
from tests.support.problems import random_partition

SGDM = SGD(lr=0.05, momentum=0.9)


def job_of(
    name: str,
    cuts: tuple[int, int | str],
    sizes: int | list[int],
    *overrides: str,
    replicas: list[int] | None = None,
    schedule: AbstractSchedule | None = None,
    where: list[tuple[int, ...]] | None = None,
    optimizer: Any = SGDM,
    minibatch: int = 16,
    max_ops: int = 16,
    steps: int = 2,
    data: Any = None,
    held_out: int = 0,
    **of_plan: Any,
) -> tuple[Job, dict[str, torch.Tensor]]:
    """The job of a model cut at random into so many parts by a seed, `cuts`; and its initial weights."""
    model, found, weights = inprocess.captured_named(name, *overrides)
    schedule, norm = schedule or OneFOneB(), optimizer.norm_for is not None
    regime, world = Regime(holds=schedule.holds), 3 if where else 8
    problem = inprocess.problem_of(found, world, minibatch, max_ops=max_ops, regime=regime, global_norm=norm)
    masks = random_partition(problem.graph, cuts[0], random.Random(cuts[1]))
    counts = [len(devices) for devices in where] if where else replicas or [1] * len(masks)
    plan = make_plan(problem, "test", list(zip(masks, counts, strict=True)), sizes, placement=where, **of_plan)
    own = {"data": data or inprocess.data_of(model), "optimizer": optimizer, "steps": steps, "held_out": held_out}
    return inprocess.make_job(found, problem, plan, schedule, model=model, **own), weights


class Ran(NamedTuple):
    """Losses of all steps, final tensors by name, and the workers."""

    losses: list[float]
    state: dict[str, Tensor]
    workers: list[Worker]


def equals_one_device(
    job: Job,
    weights: dict[str, Tensor],
    folder: Path,
    *,
    within: tuple[float, float] = (1e-9, 1e-8),
    gradients_within: float | None = None,
) -> Ran:
    """Train a job; plain PyTorch on whole mini-batches has its losses, and the parameters of every replica.

    Where passes draw random numbers the other side is the plan's own stages, in one process and one autograd graph.

    Args:
        within: largest difference of a loss, and of a parameter.
        gradients_within: the same of the gradients of every update, which are compared then.
    """
    with inprocess.recorded_gradients() as gradients:
        losses, state, workers = inprocess.run(job, folder, weights)
        draws = any(runner.module.has_random for worker in workers for runner in worker.training.runners.values())
        expected, params = (inprocess.staged_reference if draws else inprocess.reference_of)(job, weights)
        if gradients_within is not None:
            inprocess.check_gradients(workers, params, gradients, steps=job.settings.steps, within=gradients_within)
            assert all(g.abs().max() > 1e-6 for tensor in params.values() for g in gradients(tensor)), "nothing to compare"
    assert losses == pytest.approx(expected, abs=within[0])
    held = [named for worker in workers for module in worker.modules.values() for named in module.named_parameters()]
    assert {name for name, _ in held} == params.keys()
    for name, param in held:
        torch.testing.assert_close(param.detach(), params[name], rtol=0, atol=within[1], msg=lambda m, n=name: f"{n}: {m}")
    return Ran(losses, state, workers)
