"""What the rooms ask of a weight policy: how many versions of its weights a stage holds, and what they cost.

Version v of a stage's weights is what it holds after v updates. Plain weights have one version at a time, because the pipeline
drains before every update (`Flush`). Policies of pipelines that do not drain are a mechanism's, and so are the weights that a
worker has under them (`gpp.runtime.worker.around`).
"""

from __future__ import annotations

from abc import ABC
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from gpp.errors import InvalidConfig
from gpp.optimizers import AbstractOptimizer
from gpp.settings import file_word


@dataclass(frozen=True, slots=True)
class WeightWork:
    """The work on all weights of a stage together.

    Args:
        moved: bytes read and written, for each byte of the weights.
        launches: calls that each go over the whole list of tensors; each has a fixed cost, however small the weights are.
    """

    moved: float = 0.0
    launches: float = 0.0

    def __add__(self, other: WeightWork) -> WeightWork:
        return WeightWork(self.moved + other.moved, self.launches + other.launches)

    def __mul__(self, times: float) -> WeightWork:
        return WeightWork(self.moved * times, self.launches * times)


NONE = WeightWork()


class Traffic(NamedTuple):
    """Work around a forward, a backward and an update: means over a mini-batch of the steady state."""

    forward: WeightWork = NONE
    backward: WeightWork = NONE
    update: WeightWork = NONE


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelinePosition:
    """The place of a stage in a pipeline that does not drain.

    Args:
        warmup: micro-batches whose forwards are ahead of a backward: stages on the longest path after this one, for equal
            micro-batches (W(k) = D - 1 - k in a chain).
        depth: stages on the longest path of the plan (D); where replicas have their own, the stage's micro-batches that are in
            flight where the pipeline begins.
        accumulation: the stage's micro-batches between two updates (m).
    """

    warmup: int
    depth: int
    accumulation: int = 1

    @property
    def stages_before(self) -> int:
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


class AbstractWeights(ABC):
    """A weight policy: it answers as plain weights do, unless its own class says otherwise. Its settings are its fields.

    Args:
        accumulation: micro-batches between two updates, for planners; None leaves it to them.
    """

    flushes: ClassVar[bool] = False
    """Whether the pipeline drains before every update, so that there is one version at a time."""
    mechanism: ClassVar[str] = ""
    """The last part of the name of the mechanism that proves a pipeline under the policy and has its weights on a worker
    (`gpp.mechanism`); empty where weights are plain."""

    accumulation: int | None

    @property
    def name(self) -> str:
        """The word that chooses it (`strategy/weights=flush`): the name of its file, unless it says another."""
        return file_word(self)

    @property
    def same(self) -> bool:
        """Whether backwards use the weights that their forwards used, in any pipeline."""
        return True

    def microbatch_size(self, minibatch_size: int) -> int | None:
        """Samples of a micro-batch, where the user has not said otherwise; None leaves them to the planner.

        Raises:
            InvalidConfig: the accumulation that was set does not divide the mini-batch.
        """
        count = self.accumulation
        if count is not None and minibatch_size % count:
            rule = f"must divide minibatch_size={minibatch_size}"
            raise InvalidConfig("strategy.weights.accumulation", count, rule, "set strategy.weights.accumulation=1")
        return None if count is None else minibatch_size // count

    def least_accumulation(self, depth: int) -> int:
        """Micro-batches that a mini-batch must have at least in a pipeline of `depth` stages."""
        return 1

    def changes(self, position: PipelinePosition) -> bool:
        """Whether some backward of the stage uses other weights than its forward did."""
        return False

    def copies(self, position: PipelinePosition) -> int:
        """Copies of the weights that the stage holds at most, the latest one included."""
        return 1

    def follows_position(self, depth: int) -> bool:
        """Whether `copies` follow from a stage's distance to the sink alone, in pipelines of at most `depth` stages."""
        shallow, deep = (PipelinePosition(warmup=0, depth=stages) for stages in (1, max(depth, 2)))
        return self.copies(shallow) == self.copies(deep)

    def most_copies(self, depth: int) -> int:
        """The largest of `copies` over the stages of any pipeline of at most `depth` stages: the first stage of the deepest holds
        most."""
        accumulation = max(self.accumulation or 1, self.least_accumulation(depth))
        return self.copies(PipelinePosition(warmup=depth - 1, depth=depth, accumulation=accumulation))

    def staleness(self, position: PipelinePosition) -> int:
        """Updates made between the weights that a gradient's forward starts from and the update that applies it, at most."""
        return 0

    def traffic(self, position: PipelinePosition, optimizer: AbstractOptimizer | None) -> Traffic:
        """What the policy moves through memory, beyond passes and updates of one version.

        Args:
            optimizer: of the masters; None: one whose state tells all that a policy may ask of it.
        """
        return Traffic()

    def kept_factor(self, optimizer: AbstractOptimizer | None) -> float:
        """Bytes kept beside weights, copies of them, gradients and the optimizer's state, for each byte of trainable parameter."""
        return 0.0

    def optimizer_at(self, optimizer: AbstractOptimizer, position: PipelinePosition) -> AbstractOptimizer:
        """The settings of the optimizer of a stage."""
        return optimizer
