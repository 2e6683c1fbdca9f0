"""What a weight policy promises: the version of the weights behind every pass, and how many copies that costs.

Version v of a stage's weights is what it holds after v updates. A pipeline that drains between two mini-batches has one version
at a time. One that does not computes the forward of a micro-batch several updates before the gradient of it is applied;
policies differ in what they do about that. Micro-batches and updates are counted from the start of the run, by each stage; where
replicas take micro-batches in turn, by each replica, which counts its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

from gpp.errors import InvalidConfig

Backward = Literal["same", "current", "predicted"]
"""Those that the forward used; the latest; others, extrapolated for the backward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelinePosition:
    """Where a stage stands in a pipeline that does not drain.

    Args:
        warmup: micro-batches whose forwards are ahead of a backward: stages on the longest path after this one, for equal
            micro-batches (W(k) = D - 1 - k in a chain).
        depth: stages on the longest path of the plan (D); where replicas take turns, the stage's micro-batches that are in flight
            where the pipeline begins.
        accumulation: the stage's micro-batches between two updates (m).
    """

    warmup: int
    depth: int
    accumulation: int = 1

    @property
    def position(self) -> int:
        """Stages before this one, seen from the sink (k); on a branch shorter than the longest one, as if it were that long."""
        return max(self.depth - 1 - self.warmup, 0)

    def batch(self, microbatch: int) -> int:
        """The mini-batch of a micro-batch: the number of the update that applies its gradient."""
        return microbatch // self.accumulation

    def latest(self, microbatch: int, start: int = 0) -> int:
        """Updates that the stage has made when it begins the forward of `microbatch`.

        Args:
            start: updates made when the pipeline was last empty.
        """
        return max(start, (microbatch - self.warmup) // self.accumulation)


class Traffic(NamedTuple):
    """Bytes moved around each forward, each backward and each update, for each byte of the stage's weights."""

    forward: float = 0.0
    backward: float = 0.0
    update: float = 0.0


COPY = 2.0
"""Bytes moved to copy a byte: read and written."""


class AbstractWeights(ABC):
    """A weight policy. Its settings are its fields.

    Args:
        accumulation: micro-batches between two updates, for planners; None leaves it to them.
    """

    name: ClassVar[str]
    flushes: ClassVar[bool] = False
    """Whether the pipeline drains before every update, so that there is one version at a time."""
    predicts: ClassVar[bool] = False
    """Whether forwards use weights extrapolated with the optimizer's state."""

    repeats: ClassVar[bool] = True
    """Whether the forward of a micro-batch in flight can be repeated, so that a checkpoint needs no drain."""
    in_step: ClassVar[bool] = False
    """Whether all stages use one version for a micro-batch, so that a weight that several of them share stays one."""

    accumulation: int | None

    @property
    @abstractmethod
    def backward(self) -> Backward:
        """The weights that gradients of inputs go through."""

    @abstractmethod
    def forward_version(self, place: PipelinePosition, microbatch: int, start: int = 0) -> int:
        """The version that the forward of `microbatch` uses, or that is extrapolated for it.

        Args:
            start: as in `PipelinePosition.latest`; no earlier version is there.
        """

    @abstractmethod
    def copies(self, place: PipelinePosition) -> int:
        """Copies of the weights that the stage holds at most, the latest one included."""

    @abstractmethod
    def most_copies(self, depth: int) -> int:
        """The largest of `copies` over the stages of any pipeline of at most `depth` stages."""

    @abstractmethod
    def least_accumulation(self, depth: int) -> int:
        """Micro-batches that a mini-batch must have at least in a pipeline of `depth` stages."""

    @abstractmethod
    def horizon(self, place: PipelinePosition, microbatch: int, start: int = 0) -> int:
        """Updates by which the weights of a forward are extrapolated; 0: not at all."""

    @abstractmethod
    def backward_horizon(self, place: PipelinePosition) -> int:
        """The same of a backward."""

    @abstractmethod
    def traffic(self, place: PipelinePosition, prediction: float) -> Traffic:
        """What the policy moves through memory, beyond passes and updates of one version.

        Args:
            prediction: bytes moved to extrapolate a byte of weights, by the optimizer's rule.
        """

    def backward_version(self, place: PipelinePosition, microbatch: int, start: int = 0) -> int:
        """The version that the backward of `microbatch` uses, or that is extrapolated for it."""
        return self.forward_version(place, microbatch, start) if self.backward == "same" else place.batch(microbatch)

    def staleness(self, place: PipelinePosition) -> int:
        """Updates made between the weights that a gradient's forward starts from and the update that applies it, at most."""
        first = place.accumulation * (place.depth + place.warmup + 2)
        batch = range(first, first + place.accumulation)
        return max(place.batch(j) - self.forward_version(place, j) for j in batch)

    def check(self, place: PipelinePosition) -> None:
        """Refuse a pipeline in which the policy cannot hold.

        Raises:
            InvalidConfig: too few micro-batches in a mini-batch.
        """
        least = self.least_accumulation(place.depth)
        if place.accumulation < least:
            rule = f"strategy.weights={self.name} needs at least {least} micro-batches in a mini-batch, as many as are in flight"
            fix = "use a smaller microbatch_size, a larger minibatch_size, fewer devices, or strategy/weights=stash"
            raise InvalidConfig("micro-batches in a mini-batch", place.accumulation, rule, fix)


class AbstractActual(AbstractWeights):
    """Policies whose passes use weights that were, or are, the stage's own: nothing is extrapolated."""

    def horizon(self, place: PipelinePosition, microbatch: int, start: int = 0) -> int:
        return 0

    def backward_horizon(self, place: PipelinePosition) -> int:
        return 0


class AbstractRing(AbstractActual):
    """Policies that keep every version a micro-batch in flight has used, for its backward.

    Args:
        accumulation: micro-batches between two updates, for planners; None leaves it to them.
    """

    @abstractmethod
    def lag(self, place: PipelinePosition) -> int:
        """Micro-batches by which the version that a forward uses is behind the latest there could be."""

    @property
    def backward(self) -> Backward:
        return "same"

    def forward_version(self, place: PipelinePosition, microbatch: int, start: int = 0) -> int:
        return max(start, (microbatch - self.lag(place)) // place.accumulation)

    def copies(self, place: PipelinePosition) -> int:
        return -(-self.lag(place) // place.accumulation) + 1

    def most_copies(self, depth: int) -> int:
        return -(-(depth - 1) // (self.accumulation or 1)) + 1

    def least_accumulation(self, depth: int) -> int:
        return 1

    def traffic(self, place: PipelinePosition, prediction: float) -> Traffic:
        return Traffic(update=COPY if self.copies(place) > 1 else 0.0)
