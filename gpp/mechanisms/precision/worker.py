"""Passes and messages in a narrower type, and the loss scale of a worker.

The scale of the loss under float16, on which all devices agree: small gradients would be rounded to zero without it.

Losses are multiplied by the scale before their backwards, and gradients divided by it before the update. If any gradient
of any stage is not finite, all stages leave out the update and halve the scale; after `GROWTH_INTERVAL` updates in a row
they double it. The numbers are those of `torch.amp.GradScaler`, which knows one process only.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import final

import torch

from gpp.runtime.job import Job
from gpp.runtime.worker.hooks import AbstractWorkerPart, Hooks, OwnDevice
from gpp.runtime.worker.messages import Boundary, Layout
from gpp.runtime.worker.stage import StageRunner

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


def narrow_type(job: Job) -> torch.dtype:
    """The type to which passes are cast where PyTorch's rules allow."""
    return getattr(torch, str(job.settings.autocast))


class NarrowMessages(Hooks):
    """Messages in which float32 tensors travel in the type of the passes; weights and their gradients keep their own type."""

    def __init__(self, own: OwnDevice) -> None:
        self._type = narrow_type(own.job)

    def boundary(self, stage: int, found: Boundary) -> Boundary:
        specs = found.specs()
        wide = {name: spec.dtype for name, spec in specs.items()}

        def narrow(layouts: Mapping[int, Layout]) -> dict[int, Layout]:
            return {peer: self._narrowed(layout) for peer, layout in layouts.items()}

        return replace(
            found,
            incoming=narrow(found.incoming),
            outgoing=narrow(found.outgoing),
            returning_in=narrow(found.returning_in),
            returning_out=narrow(found.returning_out),
            wide=wide,
        )

    def _narrowed(self, layout: Layout) -> Layout:
        specs = (replace(spec, dtype=self._type) if spec.dtype is torch.float32 else spec for spec in layout.specs)
        return Layout(layout.names, tuple(specs), layout.whole)


@final
class ScaledLosses(NarrowMessages):
    """The loss scale, too, which float16 needs."""

    def __init__(self, own: OwnDevice) -> None:
        super().__init__(own)
        self.scale, self._runners = LossScale(), dict[int, StageRunner]()

    def attach(self, runners: Mapping[int, StageRunner]) -> None:
        self._runners |= runners
        for runner in runners.values():
            runner.loss_factor = lambda: self.scale.value

    def measured(self, norm: torch.Tensor, params: Collection[torch.Tensor]) -> torch.Tensor:
        scale = self.scale.value
        self.omits = not math.isfinite(norm.item())
        if self.omits:
            for runner in self._runners.values():
                if runner.probes:
                    runner.probes.forget()
        self.scale.agree(not self.omits)
        for param in params:
            if param.grad is not None:
                param.grad.div_(scale)
        return norm / scale

    def kept(self) -> Mapping[str, torch.Tensor]:
        return {NAME: self.scale.state}


class PrecisionWorkerPart(AbstractWorkerPart):
    """The type of passes on workers that train."""

    def context(self, job: Job, kind: str) -> partial[AbstractContextManager[object]]:
        # Without the cache of cast weights: a micro-batch of the next step must not meet this one's.
        return partial(torch.autocast, kind, dtype=narrow_type(job), cache_enabled=False)

    def build(self, own: OwnDevice) -> Hooks:
        return ScaledLosses(own) if narrow_type(own.job) is torch.float16 else NarrowMessages(own)


WORKER = PrecisionWorkerPart()
