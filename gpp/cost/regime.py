"""The rules of a strategy about time and memory. A problem carries them to whoever plans or judges."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from gpp.cost.holding import Holding
from gpp.graph.op_graph import Tensor
from gpp.weights.base import AbstractWeights
from gpp.weights.flush import Flush


class AbstractMessages(ABC):
    """The form of the messages between stages, before a plan has any."""

    @abstractmethod
    def sent_bytes(self, tensor: Tensor, dtype: str) -> float:
        """Bytes of a tensor in a message, for each sample.

        Args:
            dtype: of the graph's floating-point values.
        """


class AbstractUpdates(ABC):
    """The updates of replicated stages of which each replica makes a part, and keeps the optimizer's state of that alone."""

    @abstractmethod
    def largest(self, sizes: Mapping[str, float], replicas: int) -> float:
        """The largest part of a stage's weights that one of its replicas has.

        Args:
            sizes: bytes of each weight by name.
        """


class AbstractCourse(ABC):
    """What a pipeline does that trains nothing: forwards alone, of one mini-batch after the other, without a barrier in between.

    It is a value of a mechanism, a frozen dataclass.
    """

    mechanism: ClassVar[str]
    """The last part of the mechanism's name, by which rooms find what they ask it (`gpp.mechanism`)."""
    buffers: int
    """Micro-batches for which each input and output edge of a stage has room, beside the one that is computed."""
    writes: bool
    """Whether the model's results are written to a file."""

    @property
    @abstractmethod
    def rate(self) -> float | None:
        """Mini-batches that come in a second; None where another one always waits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Regime:
    """The rules under which plans are made and judged.

    Args:
        holds: micro-batches that a stage holds at a time, as the schedule has it.
        weights: the versions of the weights that a stage holds.
        minibatches: those between two drains, as planners see it: `Problem.minibatch_size` is then that of all of them together,
            and an update comes for each. 1 where every mini-batch drains.
        assumed_copies: of the weights, wherever a stage's position in the pipeline is not known yet
            (`AbstractPlanner.knows_versions`).
        edges: the form of messages between stages; None: tensors travel as they are.
        course: what the pipeline does in place of a training; None where it trains.
    """

    holds: Holding = field(default_factory=Holding)
    weights: AbstractWeights = field(default_factory=Flush)
    minibatches: int = 1
    assumed_copies: int = 1
    edges: AbstractMessages | None = None
    course: AbstractCourse | None = None

    @property
    def trains(self) -> bool:
        """Whether the pipeline trains the model."""
        return self.course is None

    @property
    def keeps_all(self) -> bool:
        """Whether a stage keeps every micro-batch between two drains."""
        return self.holds.everything

    def held(self, distance: Any, most: Any) -> Any:
        """Micro-batches held in full at a stage from which `distance` stages lead to the sink, itself included; of `most`."""
        return self.holds.full(distance, most)
