"""One set of leaves, written before every pass (PipeOptim, SpecTrain's first form) or never (the naive control).

A graph refers to the leaves' memory, so what is written there before a backward is what gradients of inputs go through.
"""

from __future__ import annotations

from typing import Any, final

import torch
from torch import nn

from gpp.runtime.worker.weights.base import AbstractStageWeights, alias, copy_values
from gpp.weights.base import AbstractWeights, PipelinePosition


@final
class Slots(AbstractStageWeights):
    """Passes on the policy's weights, written into one scratch copy; without one, on the masters' own memory."""

    def __init__(self, policy: AbstractWeights, position: PipelinePosition, module: nn.Module, **settings: Any) -> None:
        super().__init__(policy, position, module, **settings)
        self._slot = self.allocate() if policy.copies(position) > 1 else None
        self._leaves = alias(self._slot or self.masters)
        self._holds: int | None = None

    def reset(self) -> None:
        self._holds = None
        self._kept: dict[int, list[torch.Tensor]] = {}

    def history(self) -> dict[str, list[torch.Tensor]]:
        first = self.version * self.position.accumulation
        kept, self._kept = self._kept, {}
        return {str(number - first): tensors for number, tensors in kept.items() if number >= first}

    def ready(self, microbatch: int) -> int:
        number = self.number(microbatch)
        if (known := self.remembered.pop(str(microbatch), None)) is not None and self._slot is not None:
            self._holds = None
            copy_values(self._slot, known)
        else:
            self._fill(self.policy.horizon(self.position, number, self.start))
        if self.in_flight_at_save(number):
            # The scratch copy will hold other values by then.
            self._kept[number] = [leaf.detach().clone() for leaf in self._leaves]
        self.parameters.install(self._leaves)
        return self.policy.forward_version(self.position, number, self.start)

    def prepare(self, microbatch: int) -> int:
        self._fill(self.policy.backward_horizon(self.position))
        self.hand_over(self._leaves)
        return self.version

    def done(self, microbatch: int) -> None:
        self.take_back(self._leaves)

    def make_room(self) -> None:
        self._holds = None

    def _fill(self, horizon: int) -> None:
        if self._slot is None:
            return
        if horizon:
            self.extrapolate(self._slot, horizon)
            self._holds = None
        elif self._holds != self.version:
            copy_values(self._slot, self.masters)
            self._holds = self.version
