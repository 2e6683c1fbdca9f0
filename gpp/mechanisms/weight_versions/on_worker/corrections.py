"""The corrections of a weight policy on a worker, around a backward and an update."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import final

import torch
from torch import Tensor

from gpp.mechanisms.weight_versions.corrections.base import AbstractCorrection, Direction
from gpp.mechanisms.weight_versions.on_worker.prediction import changes_kept, foreach
from gpp.optimizers import AbstractOptimizer

SQUARES = "squared_changes"
"""Slot of the optimizer's state with the running mean of a parameter's squared changes."""


@final
class Corrections:
    """A correction at one stage.

    Args:
        correction: None where nothing is corrected.
        delay: the delay of the stage, in updates.
        spec: settings of the optimizer.
    """

    def __init__(
        self, correction: AbstractCorrection | None, delay: int, spec: AbstractOptimizer, optimizer: torch.optim.Optimizer
    ) -> None:
        self._correction, self._delay, self._spec, self._optimizer = correction, delay, spec, optimizer
        self._damping = correction.damping if correction else None
        self._direction = correction.direction(spec.momentum_factor, delay) if correction else None

    def factor(self, update: int) -> float:
        """The factor on the learning rate of an update."""
        return self._correction.rate(self._delay, update) if self._correction else 1.0

    def around(self, params: Sequence[Tensor], rate: float) -> AbstractContextManager[None]:
        """The context of the optimizer's step."""
        moved = [param for param in params if param.grad is not None]
        if moved and self._direction:
            return self._turned(moved, self._direction, rate)
        if not self._damping:
            return nullcontext()
        return changes_kept(self._optimizer, SQUARES, params, self._damping.memory, squared=True)

    @contextmanager
    def _turned(self, params: Sequence[Tensor], direction: Direction, rate: float) -> Iterator[None]:
        with torch.no_grad():
            values = [param.data for param in params]
            gradients = foreach._foreach_add([p.grad for p in params if p.grad is not None], values, alpha=self._spec.weight_decay)
        yield
        with torch.no_grad():
            momenta = [self._optimizer.state[param]["momentum_buffer"] for param in params]
            foreach._foreach_add_(values, momenta, alpha=rate * (1.0 - direction.momentum))
            foreach._foreach_add_(values, list(gradients), alpha=-rate * direction.gradient)

    def damp(self, leaves: Sequence[Tensor], masters: Sequence[Tensor], updates: int) -> None:
        """Divide the gradients of the leaves, after the backward of a whole update.

        Args:
            leaves: hold the weights of the forward.
            updates: made so far.
        """
        if not self._damping:
            return
        late = [
            (leaf, master)
            for leaf, master in zip(leaves, masters, strict=True)
            if leaf.grad is not None and leaf.data_ptr() != master.data_ptr() and SQUARES in self._optimizer.state[master]
        ]
        if not late:
            return
        with torch.no_grad():
            sizes = foreach._foreach_sqrt([self._optimizer.state[master][SQUARES] for _, master in late])
            foreach._foreach_mul_(sizes, 1.0 / math.sqrt(1.0 - self._damping.memory**updates))
            foreach._foreach_add_(sizes, self._damping.eps)
            gaps = foreach._foreach_sub([master.data for _, master in late], [leaf.data for leaf, _ in late])
            foreach._foreach_abs_(gaps)
            foreach._foreach_div_(gaps, sizes)
            foreach._foreach_add_(gaps, 1.0)
            foreach._foreach_div_([leaf.grad for leaf, _ in late if leaf.grad is not None], gaps)
