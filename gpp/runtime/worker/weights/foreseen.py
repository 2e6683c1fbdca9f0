"""Predicted weights that are kept for the backward, a set for every micro-batch in flight: SpecTrain's second form."""

from __future__ import annotations

from typing import final

from torch import Tensor

from gpp.runtime.worker.weights.base import AbstractStageWeights, alias, copy_values


@final
class Foreseen(AbstractStageWeights):
    """Forward and backward of a micro-batch on the same prediction."""

    def reset(self) -> None:
        self._free = [(tensors, alias(tensors)) for tensors in self.scratch]
        self._of: dict[int, tuple[list[Tensor] | None, list[Tensor]]] = {}

    def history(self) -> dict[str, list[Tensor]]:
        first = (self.version - self.first) * self.position.accumulation
        return {str(mb - first): tensors for mb, (tensors, _) in self._of.items() if tensors is not None}

    def ready(self, microbatch: int) -> int:
        number = self.number(microbatch)
        if self.policy.copies(self.position) == 1:
            # Nothing to foresee, and no update between this forward and its backward.
            self._of[microbatch] = None, alias(self.masters)
        else:
            if not self._free:
                fresh = self.allocate()
                self._free.append((fresh, alias(fresh)))
            tensors, _ = self._of[microbatch] = self._free.pop()
            if (known := self.remembered.pop(str(microbatch), None)) is not None:
                copy_values(tensors, known)
            else:
                self.extrapolate(tensors, self.policy.horizon(self.position, number, self.start))
        self.parameters.install(self._of[microbatch][1])
        return self.policy.forward_version(self.position, number, self.start)

    def prepare(self, microbatch: int) -> int:
        self.hand_over(self._of[microbatch][1])
        return self._used[microbatch]

    def done(self, microbatch: int) -> None:
        tensors, leaves = self._of.pop(microbatch)
        self.take_back(leaves)
        if tensors is not None:
            self._free.append((tensors, leaves))

    def make_room(self) -> None:
        pass
