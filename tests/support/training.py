"""A few steps of plain PyTorch, for tests of what can be learned."""

from __future__ import annotations

from typing import Any

import torch

from gpp.data.base import AbstractData
from gpp.data.sampler import minibatch
from gpp.models.base import AbstractModel
from gpp.models.losses import loss, metric
from gpp.optimizers import AbstractOptimizer


def trained(
    model: AbstractModel, data: AbstractData, optimizer: AbstractOptimizer, *, steps: int, minibatch_size: int, seed: int = 0
) -> float:
    """The metric on the held-out samples after so many steps on one device."""
    train, test = (data.load(split, model, seed=seed, dtype="float32") for split in ("train", "test"))
    torch.manual_seed(seed)
    network, measure = model.build(), loss(model.loss)
    steps_of = optimizer.build(network.parameters())
    for step in range(steps):
        for group in steps_of.param_groups:
            group["lr"] = optimizer.lr * optimizer.learning_rate.factor(step, steps)
        inputs, targets = parts(train.fetch(minibatch(step, minibatch_size, len(train), seed)))
        steps_of.zero_grad()
        measure(network(**inputs), targets).backward()
        if optimizer.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(network.parameters(), optimizer.clip_norm)
        steps_of.step()
    assert model.metric is not None
    inputs, targets = parts(test.fetch(range(len(test))))
    with torch.no_grad():
        return float(metric(model.metric)(network(**inputs), targets))


def parts(batch: dict[str, torch.Tensor]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Inputs and targets of what `Samples.fetch` returns."""
    inputs = {name: value for name, value in batch.items() if not name.startswith("target:")}
    return inputs, {name.removeprefix("target:"): value for name, value in batch.items() if name.startswith("target:")}
