"""Weights of one stage on one device, under a weight policy.

The optimizer owns the weights (the *masters*, which are the module's own parameters). While the pipeline runs, the
module's parameters are others, *leaves*, whose values the policy decides; gradients are handed from them to the
masters. An in-place update of a tensor that an unfinished backward needs would be refused by autograd, and swapping
`param.data` under a graph is silently wrong for the operators that saved a view of it. So a leaf to which a graph
refers keeps its memory, and what is written there is written past autograd; or the graph is made to remember, in place
of a view of a leaf, which leaf and which view it is (`AbstractStageWeights.hooks`), and then the leaf's memory is free
to be exchanged.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from gpp.optimizers import AbstractOptimizer
from gpp.program.kinds import BACKWARD, FORWARD
from gpp.runtime.worker.weights.corrections import Corrections
from gpp.runtime.worker.weights.drift import along_the_drift, drift_kept
from gpp.runtime.worker.weights.prediction import direction_kept, predictor
from gpp.weights.base import AbstractWeights, PipelinePosition

foreach: Any = torch
"""torch, whose functions over lists of tensors have no declared types."""

Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]
"""What autograd calls with a tensor that a forward saves, and with the result when the backward wants it."""


class Parameters:
    """The trained parameters of a stage's module, and other tensors in their place.

    Args:
        module: holds parameters, tied ones perhaps at several places.
    """

    def __init__(self, module: nn.Module) -> None:
        self.masters = [p for p in module.parameters() if p.requires_grad]
        index = {id(p): i for i, p in enumerate(self.masters)}
        self._places = [
            (owner._parameters, name, index[id(p)])
            for owner in module.modules()
            for name, p in owner._parameters.items()
            if id(p) in index
        ]

    def install(self, tensors: Sequence[Tensor]) -> None:
        """Let the module compute with `tensors`."""
        for holder, name, i in self._places:
            holder[name] = tensors[i]  # type: ignore[assignment]


def alias(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Leaves in the memory of `tensors`, of their shapes. Autograd does not see writes to the tensors."""
    return [tensor.data.requires_grad_() for tensor in tensors]


def copy_values(into: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    """Write the values of `tensors` into others of the same shapes."""
    with torch.no_grad():
        foreach._foreach_copy_(list(into), list(tensors))


def _beside(master: Tensor, tensor: Tensor) -> Tensor:
    """A copy on the device of its weight."""
    with torch.no_grad():
        return torch.empty_like(master, requires_grad=False).copy_(tensor)


class AbstractStageWeights(ABC):
    """The weights of one stage on one device.

    Args:
        policy, position: the weight policy, and the stage's position in the pipeline.
        optimizer: the optimizer of the masters.
        spec: its settings.
        rate: number of an update -> its learning rate.
        saved_at: whether a checkpoint is made after so many updates, with the pipeline full.

    `most` is the number of copies held at once so far beside the optimizer's. `hooks` are those under which the forward
    runs for which `forward` was called last, if it needs any. Micro-batches are counted by the device: where replicas take
    turns (`gpp.stage.Stage.round_robin`), only its own. `staleness` is the most updates seen so far between a
    forward's weights and the update of its gradient. `log`, if it is made a list, gets (F or B, micro-batch, version) of
    every pass. `backward` is called before every backward, `collect` before the gradients of the weights are made, `done` after.
    """

    def __init__(
        self,
        policy: AbstractWeights,
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
        self.parameters, self.module = Parameters(module), module
        self._before: dict[str, Tensor] = {}
        self.masters = self.parameters.masters
        self.version = self.start = self.first = self.staleness = 0
        self._used: dict[int, int] = {}
        self.remembered: dict[str, list[Tensor]] = {}
        self.log: list[tuple[str, int, int]] | None = None
        self.own = [m.data for m in self.masters]
        self.most = 0
        self.hooks: Hooks | None = None
        self._keeps_direction = policy.predictor is not None and spec.extrapolation(policy.predictor).kept > 0
        self._predict = predictor(spec, optimizer, policy.predictor) if policy.predictor else None
        self._drift_memory = policy.drift_memory(position)

    @property
    def copies(self) -> int:
        """The most copies of the weights that were held so far."""
        return 1 + self.most

    def rate(self, update: int) -> float:
        """The learning rate of an update of this stage."""
        return self._rate(update) * self._corrections.factor(update)

    def extrapolated(self, horizon: int) -> list[Tensor]:
        """The weights predicted for `horizon` updates ahead, or behind (below 0), in memory of their own."""
        if horizon < 0:
            return along_the_drift(self.optimizer, self.masters, horizon)
        assert self._predict is not None
        return self._predict(self.masters, [self.rate(self.version + j) for j in range(horizon)])

    def begin(self, first: int, start: int | None = None, remembered: Mapping[str, list[Tensor]] | None = None) -> None:
        """Begin a pass with mini-batch number `first`.

        Args:
            start: updates made when the pipeline was last empty; None: it is empty now.
            remembered: what `history` gave after `first` updates, where the pipeline was full.
        """
        self.version = self.first = first
        self.start = first if start is None else start
        # A checkpoint's tensors lie in main memory, and the weights may lie on a card.
        self.remembered = {
            key: [_beside(master, t) for master, t in zip(self.masters, own, strict=True)]
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
        """Let the module compute with the real weights again, as the pipeline is empty."""
        self.parameters.install(self.masters)

    def update(self) -> None:
        """Make the optimizer's step."""
        self.make_room()
        corrected = self._corrections.around(self.masters, self.version, self.rate(self.version))
        drifting = drift_kept(self.optimizer, self.masters, self._drift_memory) if self._drift_memory else nullcontext()
        keeping = direction_kept(self.spec, self.optimizer, self.masters) if self._keeps_direction else nullcontext()
        with drifting, corrected, keeping:
            self.optimizer.step()
        self.version += 1

    def forward(self, microbatch: int) -> None:
        """Give the module the weights that the forward of a micro-batch of the pass is to use."""
        minibatch, within = divmod(self.number(microbatch), self.position.accumulation)
        if not within and self.position.warmup and self.saved_at(minibatch):
            # Whoever goes on from that checkpoint repeats this forward, which may move running statistics.
            self._before = {name: buffer.clone() for name, buffer in self.module.named_buffers()}
        version = self._used[microbatch] = self.ready(microbatch)
        if self.log is not None:
            self.log.append((FORWARD, self.number(microbatch), version))

    def backward(self, microbatch: int) -> None:
        """Give the module the weights for the micro-batch's backward."""
        version = self.prepare(microbatch)
        if self.log is not None:
            self.log.append((BACKWARD, self.number(microbatch), version))

    def collect(self, microbatch: int) -> None:
        """Let the leaves add into what the masters have accumulated, before the gradients of the weights are made."""
        for master, leaf in zip(self.masters, self.leaves(microbatch), strict=True):
            leaf.grad = master.grad

    def done(self, microbatch: int) -> None:
        """Give the gradients to the masters, after the micro-batch's backward."""
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
        """Buffers as the first forward after the last update found them, where that came before the update."""
        found, self._before = self._before, {}
        return found

    @abstractmethod
    def scratch(self) -> list[list[Tensor]]:
        """The copies of the weights that are held now beside the optimizer's own."""

    @abstractmethod
    def history(self) -> dict[str, list[Tensor]]:
        """Weights beside the latest that a run needs to go on from this update, when it repeats the forwards of the
        micro-batches in flight; keys count from here.
        """

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
    def leaves(self, microbatch: int) -> Sequence[Tensor]:
        """The module's parameters as they were in the micro-batch's forward."""

    @abstractmethod
    def release(self, microbatch: int) -> None:
        """Let go of what was kept for a micro-batch, once its gradients have been taken."""
