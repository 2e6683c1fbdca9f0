"""Weights of one stage on one device, under a weight policy.

While the pipeline runs, the module's parameters are not the optimizer's masters but leaves, whose values the policy decides;
gradients are handed from them to the masters. An in-place update of a tensor that an unfinished backward needs would be
refused by autograd, and swapping `param.data` under a graph is silently wrong for the operators that saved a view of it. So a
leaf to which a graph refers keeps its memory, and what is written there is written past autograd; or the graph is made to
remember, in place of a view of a leaf, which leaf and which view it is (`hooks`), and then the leaf's memory is free to be
exchanged.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from gpp.mechanisms.weight_versions.base import AbstractVersionPolicy
from gpp.mechanisms.weight_versions.on_worker.corrections import Corrections
from gpp.mechanisms.weight_versions.on_worker.prediction import (
    DRIFT,
    along_the_drift,
    changes_kept,
    direction_kept,
    foreach,
    predictor,
)
from gpp.optimizers import AbstractOptimizer
from gpp.program.kinds import BACKWARD, FORWARD
from gpp.runtime.worker.around import AbstractStageWeights, SavedHooks
from gpp.weights.base import PipelinePosition


def alias(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Leaves in the memory of `tensors`, of their shapes. Autograd does not see writes to the tensors."""
    return [tensor.data.requires_grad_() for tensor in tensors]


def copy_values(into: list[Tensor], tensors: Sequence[Tensor]) -> list[Tensor]:
    """Write the values of `tensors` into others of the same shapes; returns these."""
    with torch.no_grad():
        foreach._foreach_copy_(into, list(tensors))
    return into


class AbstractVersions(AbstractStageWeights):
    """The weights of one stage on one device.

    Args:
        policy, position: the weight policy, and the stage's position in the pipeline.
        optimizer: the optimizer of the masters.
        spec: its settings.
        rate: number of an update -> its learning rate.
        saved_at: whether a checkpoint is made after so many updates, with the pipeline full.

    `most` is the number of copies held at once so far beside the optimizer's. `log`, if it is made a list, gets (F or B,
    micro-batch, version) of every pass.
    """

    def __init__(
        self,
        policy: AbstractVersionPolicy,
        position: PipelinePosition,
        module: nn.Module,
        *,
        optimizer: torch.optim.Optimizer,
        spec: AbstractOptimizer,
        rate: Callable[[int], float],
        saved_at: Callable[[int], bool] = lambda updates: False,
    ) -> None:
        self.policy, self.position, self.optimizer, self.spec, self._rate = policy, position, optimizer, spec, rate
        self._corrections = Corrections(policy.corrects(position), policy.staleness(position), spec, optimizer)
        self.saved_at = saved_at
        self.module, self.masters = module, [p for p in module.parameters() if p.requires_grad]
        index = {id(p): i for i, p in enumerate(self.masters)}
        # Tied ones stand at several places.
        self._places = [
            (owner._parameters, name, index[id(p)])
            for owner in module.modules()
            for name, p in owner._parameters.items()
            if id(p) in index
        ]
        self._before: dict[str, Tensor] = {}
        self.version = self.start = self.first = self.staleness = 0
        self._used: dict[int, int] = {}
        self.remembered: dict[str, list[Tensor]] = {}
        self.log: list[tuple[str, int, int]] | None = None
        self.own = [m.data for m in self.masters]
        self.most = 0
        self.hooks: SavedHooks | None = None
        self._keeps_direction = policy.predictor is not None and policy.prediction(spec).kept > 0
        self._predict = predictor(spec, optimizer, policy.predictor) if policy.predictor else None
        self._drift_memory = policy.drift_memory(position)

    @property
    def copies(self) -> int:
        return 1 + self.most

    def rate(self, update: int) -> float:
        return self._rate(update) * self._corrections.factor(update)

    def extrapolated(self, horizon: int) -> list[Tensor]:
        """The weights predicted for `horizon` updates ahead, or behind (below 0), in memory of their own."""
        if horizon < 0:
            return along_the_drift(self.optimizer, self.masters, horizon)
        assert self._predict is not None
        return self._predict(self.masters, [self.rate(self.version + j) for j in range(horizon)])

    def begin(self, first: int, start: int | None = None, remembered: Mapping[str, list[Tensor]] | None = None) -> None:
        self.version = self.first = first
        self.start = first if start is None else start
        # A checkpoint's tensors lie in main memory and the weights may lie on a card, so each is copied by itself.
        self.remembered = {
            key: [room.copy_(tensor) for room, tensor in zip(self.empty(), own, strict=True)]
            for key, own in (remembered or {}).items()
        }
        self.reset()

    def in_flight_at_save(self, number: int) -> bool:
        """Whether the micro-batch is in flight at a checkpoint: the last update is between its forward and backward."""
        m = self.position.accumulation
        return any(self.saved_at(done) for done in range((number - self.position.warmup) // m + 1, number // m + 1))

    def number(self, microbatch: int) -> int:
        """A micro-batch of the pass, counted from the start of the run."""
        return self.first * self.position.accumulation + microbatch

    def settle(self) -> None:
        self.install(self.masters)

    def install(self, tensors: Sequence[Tensor]) -> None:
        """Let the module compute with `tensors`."""
        for holder, name, i in self._places:
            holder[name] = tensors[i]  # type: ignore[assignment]

    def empty(self) -> list[Tensor]:
        """Memory for a copy of the weights."""
        return [torch.empty_like(master, requires_grad=False) for master in self.masters]

    def update(self) -> None:
        self.make_room()
        corrected = self._corrections.around(self.masters, self.rate(self.version))
        memory = self._drift_memory
        drifting = changes_kept(self.optimizer, DRIFT, self.masters, memory) if memory else nullcontext()
        keeping = direction_kept(self.spec, self.optimizer, self.masters) if self._keeps_direction else nullcontext()
        with drifting, corrected, keeping:
            self.optimizer.step()
        self.version += 1

    def forward(self, microbatch: int) -> None:
        minibatch, within = divmod(self.number(microbatch), self.position.accumulation)
        if not within and self.position.warmup and self.saved_at(minibatch):
            # Whoever goes on from that checkpoint repeats this forward, which may move running statistics.
            self._before = {name: buffer.clone() for name, buffer in self.module.named_buffers()}
        version = self._used[microbatch] = self.ready(microbatch)
        if self.log is not None:
            self.log.append((FORWARD, self.number(microbatch), version))

    def backward(self, microbatch: int) -> None:
        version = self.prepare(microbatch)
        if self.log is not None:
            self.log.append((BACKWARD, self.number(microbatch), version))

    def collect(self, microbatch: int) -> None:
        for master, leaf in zip(self.masters, self.leaves(microbatch), strict=True):
            leaf.grad = master.grad

    def done(self, microbatch: int) -> None:
        leaves = self.leaves(microbatch)
        self._corrections.damp(leaves, self.masters, self.version)
        for master, leaf in zip(self.masters, leaves, strict=True):
            master.grad, leaf.grad = leaf.grad, None
        self.staleness = max(self.staleness, self.version - self._used.pop(microbatch))
        self.release(microbatch)

    @abstractmethod
    def reset(self) -> None:
        """Forget all versions but the latest."""

    def take_before(self) -> dict[str, Tensor]:
        found, self._before = self._before, {}
        return found

    def held(self) -> Iterator[Tensor]:
        return (tensor for copy in (self.own, *self.scratch()) for tensor in copy)

    @abstractmethod
    def scratch(self) -> list[list[Tensor]]:
        """The copies of the weights that are held now beside the optimizer's own."""

    @abstractmethod
    def make_room(self) -> None:
        """Save what a pass still needs of the version that the next update replaces in place."""

    @abstractmethod
    def ready(self, microbatch: int) -> int:
        """Install the weights of a forward of the pass; returns their version, or that they are extrapolated from."""

    @abstractmethod
    def prepare(self, microbatch: int) -> int:
        """Install the weights of the backward, whose graph refers to the forward's leaves."""

    @abstractmethod
    def release(self, microbatch: int) -> None:
        """Let go of what was kept for a micro-batch, once its gradients have been taken."""
