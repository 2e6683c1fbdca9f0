"""What mechanisms add to a captured model: what can be left of a backward for later, and other ways to run operators."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from gpp.mechanism import found

if TYPE_CHECKING:
    from gpp.capture.measure import Facts
    from gpp.capture.stage import StageModule
    from gpp.graph.captured import Captured, Node


class MeasuredModel(NamedTuple):
    """A captured model, measured.

    Args:
        nodes: by name, what is known of each in `facts`.
        calls: those that a training pass calls, in order.
        losses: those among them that are losses.
        closures: the nodes of each operator, and those without an operator that it needs.
    """

    nodes: Mapping[str, Node]
    facts: Mapping[str, Facts]
    calls: Sequence[str]
    losses: Iterable[str]
    closures: Sequence[Iterable[str]]


class AbstractCapturePart(ABC):
    """A way to leave gradients of weights."""

    @abstractmethod
    def left(self, model: MeasuredModel) -> tuple[Collection[str], Mapping[int, int]]:
        """The nodes whose gradients of weights can be left, and the bytes that each operator answers for meanwhile."""

    @abstractmethod
    def parted(self, module: StageModule) -> Callable[[], Callable[[], None]] | None:
        """Let the backwards of a module leave them.

        Returns:
            A function to be called behind each backward, which returns one that makes what is left. None: nothing can be left.
        """


def capture_part() -> AbstractCapturePart | None:
    """The first mechanism's that has one."""
    return next(iter(found("capture", "CAPTURE", AbstractCapturePart).values()), None)


class AbstractVariants(ABC):
    """Other ways to run operators."""

    @abstractmethod
    def declared(self, captured: Captured) -> Captured:
        """A captured model whose operators declare them (`gpp.graph.op_graph.Variant`)."""


def declaring(captured: Captured) -> Captured:
    """A captured model with what all mechanisms let its operators declare."""
    for part in found("variants", "VARIANTS", AbstractVariants).values():
        captured = part.declared(captured)
    return captured
