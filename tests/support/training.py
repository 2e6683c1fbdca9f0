"""Trainings and evaluations in plain PyTorch, on whole mini-batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from gpp.data.base import AbstractData, Samples
from gpp.data.sampler import minibatch
from gpp.models.base import AbstractModel
from gpp.models.losses import loss, loss_terms, metric
from gpp.optimizers import AbstractOptimizer


def trained(
    model: AbstractModel, data: AbstractData, optimizer: AbstractOptimizer, *, steps: int, minibatch_size: int, seed: int = 0
) -> float:
    """The metric on the held-out samples after so many steps on one device."""
    train, test = (data.load(split, model, seed=seed, dtype="float32") for split in ("train", "test"))
    torch.manual_seed(seed)
    network = model.build()
    fit(network, model, train, optimizer, steps=steps, minibatch_size=minibatch_size, seed=seed)
    assert model.metric is not None
    inputs, targets = parts(test.fetch(range(len(test))))
    with torch.no_grad():
        return float(metric(model.metric)(network(**inputs), targets))


def fit(
    network: nn.Module,
    model: AbstractModel,
    samples: Samples,
    optimizer: AbstractOptimizer,
    *,
    steps: int,
    minibatch_size: int,
    seed: int = 0,
) -> list[float]:
    """Train the network of a model; the loss of every step."""
    updates, losses = optimizer.build(network.parameters()), []
    for step in range(steps):
        for group in updates.param_groups:
            group["lr"] = optimizer.lr * optimizer.learning_rate.factor(step, steps)
        value = loss_of(network, model, samples.fetch(minibatch(step, minibatch_size, len(samples), seed)))
        updates.zero_grad()
        value.backward()
        if optimizer.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(network.parameters(), optimizer.clip_norm)
        updates.step()
        losses.append(value.item())
    return losses


def loss_of(network: nn.Module, model: AbstractModel, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The loss of some samples, its terms summed."""
    inputs, targets = parts(batch)
    return torch.stack(list(loss_terms(loss(model.loss)(network(**inputs), targets)).values())).sum()


def held_out_loss(model: AbstractModel, data: AbstractData, state: dict[str, torch.Tensor], rows: Sequence[int]) -> float:
    """The loss of some held-out samples in evaluation mode, in float64, with the tensors of `state`."""
    network = model.build().double().eval()
    network.load_state_dict(state)
    with torch.no_grad():
        return float(loss_of(network, model, data.load("test", model, seed=0, dtype="float64").fetch(rows)))


def parts(batch: dict[str, torch.Tensor]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Inputs and targets of what `Samples.fetch` returns."""
    inputs = {name: value for name, value in batch.items() if not name.startswith("target:")}
    return inputs, {name.removeprefix("target:"): value for name, value in batch.items() if name.startswith("target:")}
