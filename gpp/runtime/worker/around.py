"""What mechanisms do around the passes of a stage, behind them, and with its weights and the sums of their gradients."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from torch import Tensor

from gpp.runtime.transport.channels import Handle

if TYPE_CHECKING:
    from gpp.capture.stage import StageWatcher

SavedHooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]
"""What autograd calls with a tensor that a forward saves, and with the result when the backward wants it."""


class AbstractAround(ABC):
    """What a mechanism does around the passes of a stage whose activations it has hold of: nothing else keeps them."""

    @abstractmethod
    def forward(self, microbatch: int, hooks: SavedHooks | None) -> AbstractContextManager[StageWatcher]:
        """Context of a forward; it gives what is told which nodes the stage's code calls.

        Args:
            hooks: of the weight policy, for what autograd saves.
        """

    @abstractmethod
    def arrive(self, microbatch: int) -> None:
        """Before a backward: see to it that all of its micro-batch is there."""


class AbstractSums(ABC):
    """Sums of gradient groups of which each device is left with a part, whose weights are its own to update."""

    @abstractmethod
    def order(self, group: int) -> Sequence[str]:
        """The parameters of a gradient group, in the order of their gradients in its buffer."""

    @abstractmethod
    def begin(self, group: int, flat: Tensor) -> Handle:
        """Start to sum a group's buffer, [elements], over its devices."""

    @abstractmethod
    def norm(self, counted: Sequence[str]) -> Tensor:
        """The norm of the gradients of some parameters of the device, whose sums may be elsewhere."""


class AbstractRest(ABC):
    """What a backward of a stage leaves to a later pass, which makes the gradients of its weights."""

    @abstractmethod
    def keep(self, microbatch: int, number: int) -> None:
        """Behind the backward: keep what it has left.

        Args:
            number: of the micro-batch, among those that this device counts for its weights; here and below.
        """

    @abstractmethod
    def sent(self, microbatch: int, made: dict[str, Tensor]) -> Mapping[str, dict[str, Tensor]]:
        """The tensors that go to others after the backward, by direction and name.

        Args:
            made: the gradients of the stage's inputs.
        """

    @abstractmethod
    def finish(self, microbatch: int, number: int) -> None:
        """Add to the gradients of the weights."""


class AbstractStageWeights(ABC):
    """The weights of one stage on one device.

    The optimizer owns its *masters*, which are the module's own parameters; the module may compute with other tensors in their
    place, the *leaves* of a pass, whose gradients come to the masters. Micro-batches are counted by the device, from the begin of
    a stretch: only those in which it has a part (`gpp.stage.Stage.stride`).

    `hooks` are those under which the forward runs for which `forward` was called last, if it needs any. `staleness` is the most
    updates seen so far between a forward's weights and the update of its gradient.
    """

    masters: Sequence[Tensor]
    hooks: SavedHooks | None
    staleness: int

    @property
    @abstractmethod
    def copies(self) -> int:
        """The most copies of the weights that were held so far."""

    @abstractmethod
    def held(self) -> Iterable[Tensor]:
        """The tensors of all copies that are held now."""

    @abstractmethod
    def rate(self, update: int) -> float:
        """The learning rate of an update of this stage."""

    @abstractmethod
    def begin(self, first: int, start: int | None = None, remembered: Mapping[str, list[Tensor]] | None = None) -> None:
        """Begin a stretch with mini-batch number `first`.

        Args:
            start: updates made when the pipeline was last empty; None: it is empty now.
            remembered: what `history` gave after `first` updates, where the pipeline was full.
        """

    @abstractmethod
    def settle(self) -> None:
        """Let the module compute with the masters again, as the pipeline is empty."""

    @abstractmethod
    def forward(self, microbatch: int) -> None:
        """Give the module the weights that the forward of a micro-batch is to use."""

    @abstractmethod
    def backward(self, microbatch: int) -> None:
        """Give the module the weights for the micro-batch's backward."""

    @abstractmethod
    def leaves(self, microbatch: int) -> Sequence[Tensor]:
        """The module's parameters as they were in the micro-batch's forward."""

    @abstractmethod
    def collect(self, microbatch: int) -> None:
        """Let the leaves add into what the masters have accumulated, before the gradients of the weights are made."""

    @abstractmethod
    def done(self, microbatch: int) -> None:
        """Give the gradients to the masters, behind the micro-batch's backward."""

    @abstractmethod
    def update(self) -> None:
        """Make the optimizer's step."""

    @abstractmethod
    def history(self) -> dict[str, list[Tensor]]:
        """Weights beside the latest that a run needs to go on from this update, when it repeats the forwards of the
        micro-batches in flight; keys count from here.
        """

    @abstractmethod
    def take_before(self) -> dict[str, Tensor]:
        """Buffers as the first forward after the last update found them, where that came before the update."""
