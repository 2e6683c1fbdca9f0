"""What mechanisms do around the passes of a stage, behind them, and with the sums of their gradients."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
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
