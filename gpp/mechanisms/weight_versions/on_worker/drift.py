"""The running mean of a stage's updates, along which weights are extrapolated into the past."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from gpp.mechanisms.weight_versions.on_worker.prediction import copied

foreach: Any = torch
"""torch, whose functions over lists of tensors have no declared types."""

DRIFT = "drift"
"""Slot of the optimizer's state with the mean."""


@contextmanager
def drift_kept(optimizer: torch.optim.Optimizer, params: Sequence[Tensor], memory: float) -> Iterator[None]:
    """Take an update into the mean, in which the past has the weight `memory`. This is a context around the update."""
    moved = [param for param in params if param.grad is not None]
    before = copied([param.data for param in moved])
    yield
    if not moved:
        return
    with torch.no_grad():
        changes = foreach._foreach_sub([param.data for param in moved], before)
        for param, change in zip(moved, changes, strict=True):
            if DRIFT not in optimizer.state[param]:
                optimizer.state[param][DRIFT] = torch.zeros_like(change)
        means = [optimizer.state[param][DRIFT] for param in moved]
        foreach._foreach_mul_(means, memory)
        foreach._foreach_add_(means, list(changes), alpha=1.0 - memory)


def along_the_drift(optimizer: torch.optim.Optimizer, params: Sequence[Tensor], horizon: int) -> list[Tensor]:
    """The weights so many updates ahead, which is below 0 for those behind, in memory of their own."""
    with torch.no_grad():
        values = [param.data for param in params]
        known = [i for i, param in enumerate(params) if DRIFT in optimizer.state.get(param, {})]
        if len(known) < len(values):
            # A parameter that no gradient has reached so far.
            out = copied(values)
            for i in known:
                out[i].add_(optimizer.state[params[i]][DRIFT], alpha=horizon)
            return out
        return list(foreach._foreach_add(values, [optimizer.state[param][DRIFT] for param in params], alpha=horizon))
