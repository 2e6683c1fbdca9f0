"""Several of torch's optimizers, each for parameters of its own, as one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import torch


@final
class JointOptimizer(torch.optim.Optimizer):
    """The groups and the state of all parts; a step is one step of each."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        self._parts = list(parts)
        super().__init__([group for part in parts for group in part.param_groups], {})

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        groups = list(self.param_groups)
        for part in self._parts:
            # A restored state is another object.
            part.state = self.state
            part.param_groups, groups = groups[: len(part.param_groups)], groups[len(part.param_groups) :]
            part.step()


def joint(parts: Sequence[torch.optim.Optimizer]) -> torch.optim.Optimizer:
    """One optimizer of one or more."""
    return parts[0] if len(parts) == 1 else JointOptimizer(parts)
