"""Predicted weights that are kept for the backward: SpecTrain's second form.

Micro-batches in flight of one prediction share it. One without an update between its forward and its backward uses the
optimizer's own memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from torch import Tensor

from gpp.mechanisms.weight_versions.base import Source
from gpp.mechanisms.weight_versions.on_worker.base import AbstractVersions, alias
from gpp.mechanisms.weight_versions.on_worker.prediction import copied


@dataclass(slots=True)
class _Values:
    tensors: list[Tensor]
    leaves: list[Tensor]
    users: int = 0


@final
class Foreseen(AbstractVersions):
    """Forward and backward of a micro-batch on the same prediction."""

    def reset(self) -> None:
        self._real = alias(self.masters)
        self._held: dict[Source, _Values] = {}
        self._of: dict[int, Source | None] = {}

    def scratch(self) -> list[list[Tensor]]:
        return [values.tensors for values in self._held.values()]

    def history(self) -> dict[str, list[Tensor]]:
        first = (self.version - self.first) * self.position.accumulation
        return {str(mb - first): self._held[source].tensors for mb, source in self._of.items() if source is not None}

    def ready(self, microbatch: int) -> int:
        number, known = self.number(microbatch), self.remembered.pop(str(microbatch), None)
        source = self._of[microbatch] = self.policy.lasting(self.position, number, self.start)
        if source is not None:
            if source not in self._held:
                # A version that is kept as it is, is one that is extrapolated by no update.
                tensors = self.extrapolated(source[1]) if known is None else copied(known)
                self._held[source] = _Values(tensors, alias(tensors))
                self.most = max(self.most, len(self._held))
            self._held[source].users += 1
        self.parameters.install(self.leaves(microbatch))
        return self.policy.forward_version(self.position, number, self.start)

    def leaves(self, microbatch: int) -> list[Tensor]:
        source = self._of[microbatch]
        return self._real if source is None else self._held[source].leaves

    def prepare(self, microbatch: int) -> int:
        return self._used[microbatch]

    def release(self, microbatch: int) -> None:
        source = self._of.pop(microbatch)
        if source is not None:
            self._held[source].users -= 1
            if not self._held[source].users:
                del self._held[source]

    def make_room(self) -> None:
        pass
