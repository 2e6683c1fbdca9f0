"""A training on stages, in threads, beside the same training on one device."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from gpp.runtime.job import Job, restore
from gpp.runtime.worker.worker import Worker
from tests.support import inprocess


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
    own = job.settings
    model, data, optimizer = (restore(each) for each in (own.model, own.data, own.optimizer))
    with inprocess.recorded_gradients() as gradients:
        losses, state, workers = inprocess.run(job, folder, weights)
        if any(runner.module.has_random for worker in workers for runner in worker.training.runners.values()):
            expected, params = inprocess.staged_reference(job, model, data, weights)
        else:
            size, dtype = own.minibatch_size, own.dtype
            expected, params = inprocess.reference(
                model, data, optimizer, weights, steps=own.steps, minibatch_size=size, dtype=dtype, seed=own.seed
            )
        if gradients_within is not None:
            inprocess.check_gradients(workers, params, gradients, steps=own.steps, within=gradients_within)
            assert all(g.abs().max() > 1e-6 for tensor in params.values() for g in gradients(tensor)), "nothing to compare"
    assert losses == pytest.approx(expected, abs=within[0])
    held = [named for worker in workers for module in worker.modules.values() for named in module.named_parameters()]
    assert {name for name, _ in held} == params.keys()
    for name, param in held:
        torch.testing.assert_close(param.detach(), params[name], rtol=0, atol=within[1], msg=lambda m, n=name: f"{n}: {m}")
    return Ran(losses, state, workers)
