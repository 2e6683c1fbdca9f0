"""Versions that live as long as a micro-batch needs them: stashing, vertical sync, double buffering.

Every version has memory and leaves of its own, so a backward finds the very tensors of its forward, and nothing is
copied around a pass. An update of a version that is still needed first moves the masters, by one copy, into memory that
nobody needs.

Predicted weights that are kept for the backward: SpecTrain's second form.

Micro-batches in flight of one prediction share it. One without an update between its forward and its backward uses the
optimizer's own memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

from torch import Tensor, nn

from gpp.mechanisms.weight_versions.base import AbstractVersionPolicy, Source
from gpp.mechanisms.weight_versions.on_worker.base import AbstractVersions, alias, copy_values
from gpp.weights.base import PipelinePosition


@dataclass(slots=True)
class _Version:
    """Weights that micro-batches use, as leaves; `number` is their version's, where they are no prediction."""

    tensors: list[Tensor]
    leaves: list[Tensor]
    number: int = -1
    users: int = 0


@final
class KeptVersions(AbstractVersions):
    """Forward and backward of a micro-batch on one version, which the policy names."""

    def __init__(self, policy: AbstractVersionPolicy, position: PipelinePosition, module: nn.Module, **settings: Any) -> None:
        super().__init__(policy, position, module, **settings)
        self._memory: list[list[Tensor]] = []

    def scratch(self) -> list[list[Tensor]]:
        return self._memory

    def _room(self) -> list[Tensor]:
        """Memory for one version that nobody needs, or more of it."""
        if self._free:
            return self._free.pop()
        self._memory.append(self.empty())
        self.most = len(self._memory)
        return self._memory[-1]

    def reset(self) -> None:
        held = {t.data_ptr() for t in self.masters}
        # The masters may have moved into what was scratch memory, and left what was theirs.
        self._free = [tensors for tensors in (self.own, *self._memory) if {t.data_ptr() for t in tensors} != held]
        self._versions = {self.version: _Version([m.data for m in self.masters], alias(self.masters), self.version)}
        self._of: dict[int, _Version] = {}
        self._next = self.number(0)
        for key, tensors in self.remembered.items():
            number, memory = self.version - int(key), copy_values(self._room(), tensors)
            self._versions[number] = _Version(memory, alias(memory), number)

    def history(self) -> dict[str, list[Tensor]]:
        return {str(self.version - n): v.tensors for n, v in self._versions.items() if n != self.version}

    def ready(self, microbatch: int) -> int:
        number = self.number(microbatch)
        which = self.policy.forward_version(self.position, number, self.start)
        version = self._of[microbatch] = self._versions[which]
        version.users += 1
        self._next = number + 1
        self.install(version.leaves)
        return which

    def prepare(self, microbatch: int) -> int:
        return self._of[microbatch].number

    def leaves(self, microbatch: int) -> list[Tensor]:
        return self._of[microbatch].leaves

    def release(self, microbatch: int) -> None:
        self._of.pop(microbatch).users -= 1

    def make_room(self) -> None:
        oldest = self.policy.forward_version(self.position, self._next, self.start)
        for number in [n for n, v in self._versions.items() if n < oldest and not v.users and n != self.version]:
            self._free.append(self._versions.pop(number).tensors)
        latest = self._versions[self.version]
        if not latest.users and oldest > self.version:
            latest.number += 1
            self._versions[latest.number] = self._versions.pop(self.version)
            return
        fresh = copy_values(self._room(), self.masters)
        for into, master in zip(fresh, self.masters, strict=True):
            # No graph refers to a master, only to leaves, so it may move.
            master.data = into
        self._versions[self.version + 1] = _Version(fresh, alias(fresh), self.version + 1)


@final
class Foreseen(AbstractVersions):
    """Forward and backward of a micro-batch on the same prediction."""

    def reset(self) -> None:
        self._real = alias(self.masters)
        self._held: dict[Source, _Version] = {}
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
                tensors = self.extrapolated(source[1]) if known is None else known
                self._held[source] = _Version(tensors, alias(tensors))
                self.most = max(self.most, len(self._held))
            self._held[source].users += 1
        self.install(self.leaves(microbatch))
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
