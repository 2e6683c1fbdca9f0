"""The scale of the loss under float16, on which all devices agree: small gradients would be rounded to zero without it.

Losses are multiplied by the scale before their backwards, and gradients divided by it before the update. If any gradient
of any stage is not finite, all stages leave out the update and halve the scale; after `GROWTH_INTERVAL` updates in a row
they double it. The numbers are those of `torch.amp.GradScaler`, which knows one process only.
"""

from __future__ import annotations

from typing import final

import torch

INITIAL = 2.0**16
GROWTH, BACKOFF = 2.0, 0.5
GROWTH_INTERVAL = 2000

NAME = "(loss scale)"
"""Under which checkpoints hold it; no parameter of a module can be called so."""


@final
class LossScale:
    """The scale, and how many updates have been done since it changed last."""

    def __init__(self) -> None:
        self.state = torch.tensor([INITIAL, 0.0], dtype=torch.float64)

    @property
    def value(self) -> float:
        return self.state[0].item()

    def agree(self, finite: bool) -> None:
        """Note whether all gradients of a step were finite. Every device notes the same."""
        scale, done = self.state.tolist()
        if not finite:
            scale, done = scale * BACKOFF, 0.0
        elif done + 1 == GROWTH_INTERVAL:
            scale, done = scale * GROWTH, 0.0
        else:
            done += 1
        self.state.copy_(torch.tensor([scale, done]))
