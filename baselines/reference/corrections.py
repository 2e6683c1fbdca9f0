"""What a correction does in the loop of one process: its formulas, parameter by parameter.

This shares nothing with the workers' corrections but the numbers that a correction declares, so each checks the other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from gpp.mechanisms.weight_versions.corrections.base import AbstractCorrection
from gpp.optimizers import AbstractOptimizer

MEAN = "squared_changes"
"""The name that a checkpoint knows the running mean by."""


def corrected_step(
    correction: AbstractCorrection, delay: int, spec: AbstractOptimizer, optimizer: torch.optim.Optimizer, rate: float
) -> None:
    """The optimizer's step, corrected."""
    direction, damping = correction.direction(spec.momentum_factor, delay), correction.damping
    found = [
        (p, p.grad.add(p.data, alpha=spec.weight_decay), p.data.clone())
        for group in optimizer.param_groups
        for p in group["params"]
        if p.grad is not None
    ]
    optimizer.step()
    for p, gradient, old in found:
        if direction:
            p.data.add_(optimizer.state[p]["momentum_buffer"], alpha=rate * (1.0 - direction.momentum))
            p.data.add_(gradient, alpha=-rate * direction.gradient)
        if damping:
            _note(optimizer.state[p], p.data - old, damping.memory)


def _note(state: dict[str, Tensor], change: Tensor, memory: float) -> None:
    mean = state.get(MEAN, torch.zeros_like(change)) * memory
    state[MEAN] = mean.addcmul(change, change, value=1.0 - memory)


def damp(
    correction: AbstractCorrection,
    optimizer: torch.optim.Optimizer,
    gradients: Sequence[Tensor | None],
    used: Sequence[Tensor],
    masters: Sequence[Tensor],
    updates: int,
) -> None:
    """Divide the gradients of a backward, in place, by how far the weights are from those that its forward used."""
    damping = correction.damping
    for gradient, old, master in zip(gradients, used, masters, strict=True):
        mean = optimizer.state[master].get(MEAN) if damping else None
        if damping and mean is not None and gradient is not None:
            usual = mean.sqrt() * (1.0 / math.sqrt(1.0 - damping.memory**updates)) + damping.eps
            gradient.copy_(gradient / ((master.data - old.data).abs() / usual + 1.0))
