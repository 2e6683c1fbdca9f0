"""Predicted weights that are kept for the backward, a set for every micro-batch in flight: SpecTrain's second form."""

from __future__ import annotations

from typing import final

from torch import Tensor

from gpp.runtime.weights.base import AbstractStageWeights, alias


@final
class Foreseen(AbstractStageWeights):
    """Forward and backward of a micro-batch on the same prediction."""

    def reset(self) -> None:
        self._free = [(tensors, alias(tensors)) for tensors in self.scratch]
        self._of: dict[int, tuple[list[Tensor] | None, list[Tensor]]] = {}
        self._from: dict[int, int] = {}

    def ready(self, microbatch: int) -> int:
        if self.policy.copies(self.place) == 1:
            # Nothing to foresee, and no update between this forward and its backward.
            self._of[microbatch] = None, alias(self.masters)
        else:
            if not self._free:
                fresh = self.allocate()
                self._free.append((fresh, alias(fresh)))
            tensors, _ = self._of[microbatch] = self._free.pop()
            self.extrapolate(tensors, self.policy.horizon(self.place, self.number(microbatch), self.start))
        self.parameters.install(self._of[microbatch][1])
        self._from[microbatch] = self.version
        return self.version

    def prepare(self, microbatch: int) -> int:
        self.hand_over(self._of[microbatch][1])
        return self._from.pop(microbatch)

    def done(self, microbatch: int) -> None:
        tensors, leaves = self._of.pop(microbatch)
        self.take_back(leaves)
        if tensors is not None:
            self._free.append((tensors, leaves))

    def make_room(self) -> None:
        pass
