"""The scale of the loss under float16, on which all devices agree: small gradients would be rounded to zero without it.

Losses are multiplied by the scale before their backwards, and gradients divided by it before the update. If any gradient
of any stage is not finite, all stages leave out the update and halve the scale; after `GROWTH_INTERVAL` updates in a row
they double it. The numbers are those of `torch.amp.GradScaler`, which knows one process only.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import final

import torch

from gpp.runtime.worker.hooks import AbstractWorkerPart, Hooks, OwnDevice
from gpp.runtime.worker.stage import StageRunner

INITIAL = 2.0**16
GROWTH, BACKOFF = 2.0, 0.5
GROWTH_INTERVAL = 2000

NAME = "(loss scale)"
"""Under which checkpoints hold it; no parameter of a module can be called so."""


@final
class ScaledLosses(Hooks):
    """The loss scale of a worker, which float16 needs. `state` is [scale, updates since it changed last], alike on all devices."""

    def __init__(self) -> None:
        self.state, self._runners = torch.tensor([INITIAL, 0.0], dtype=torch.float64), dict[int, StageRunner]()

    @property
    def scale(self) -> float:
        return self.state[0].item()

    def attach(self, runners: Mapping[int, StageRunner]) -> None:
        self._runners |= runners
        for runner in runners.values():
            runner.loss_factor = lambda: self.scale

    def measured(self, norm: torch.Tensor, params: Collection[torch.Tensor]) -> torch.Tensor:
        scale, done = self.state.tolist()
        self.omits = not math.isfinite(norm.item())
        if self.omits:
            for runner in self._runners.values():
                if runner.probes:
                    runner.probes.forget()
            new = scale * BACKOFF, 0.0
        else:
            new = (scale * GROWTH, 0.0) if done + 1 == GROWTH_INTERVAL else (scale, done + 1)
        self.state.copy_(torch.tensor(new))
        for param in params:
            if param.grad is not None:
                param.grad.div_(scale)
        return norm / scale

    def kept(self) -> Mapping[str, torch.Tensor]:
        return {NAME: self.state}


class PrecisionWorkerPart(AbstractWorkerPart):
    """The scale on workers that train in float16; what passes compute in is the captured model's (`narrow.py`)."""

    def build(self, own: OwnDevice) -> Hooks | None:
        return ScaledLosses() if own.job.settings.autocast == "float16" else None


WORKER = PrecisionWorkerPart()
