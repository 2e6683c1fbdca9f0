"""What a correction promises: how an update differs where its gradient was made so many updates earlier.

A weight policy says which weights a pass computes with. A correction goes with it and leaves the passes alone: it changes
what is done with the gradient that they make. It declares numbers, from the delay of the stage (`AbstractWeights.staleness`):
the rate, the momentum, the direction of the step, the size of the gradient. Workers and `engine=reference` each carry
them out in code of their own.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

from pydantic_core import CoreSchema, core_schema

from gpp.weights.base import NONE, WeightWork


class Direction(NamedTuple):
    """A step of SGD with momentum, W - r (a v + b g), in place of W - r v.

    Args:
        momentum: share of the momentum v, the gradient in it already (a).
        gradient: share of the gradient g, coupled weight decay included (b).
    """

    momentum: float = 1.0
    gradient: float = 0.0


class Damping(NamedTuple):
    """Gradients divided, element by element, by 1 + |W - W'| / (C + eps), with W' the weights of the forward.

    C is the root of a running mean of the squared changes of W over past updates, its start corrected as Adam's.

    Args:
        memory: weight of the past in that mean.
    """

    memory: float
    eps: float


class Cost(NamedTuple):
    """What a correction costs a stage whose gradients are late.

    Args:
        backward, update: work around each.
        kept: bytes kept, for each byte of the weights.
    """

    backward: WeightWork = NONE
    update: WeightWork = NONE
    kept: float = 0.0


class AbstractCorrection(ABC):
    """A correction. Its settings are its fields; it overrides what it changes. Delays are in updates, 1 at least."""

    name: ClassVar[str]
    cost: ClassVar[Cost] = Cost()

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Callable[[Any], CoreSchema]) -> CoreSchema:
        # Which correction a policy has is no matter of its fields: whoever reads a policy reads its correction apart.
        return core_schema.is_instance_schema(cls) if cls is AbstractCorrection else handler(source)

    def rate(self, delay: int, update: int) -> float:
        """Factor of the learning rate of an update, counted from the start of the run."""
        return 1.0

    def momentum(self, momentum: float, delay: int, depth: int) -> float:
        """The optimizer's momentum (Adam's first factor) at a stage of a pipeline of `depth`."""
        return momentum

    def direction(self, momentum: float, delay: int) -> Direction | None:
        """The step of SGD with momentum; None: as it is."""
        return None

    @property
    def damping(self) -> Damping | None:
        """How gradients are damped; None: not at all."""
        return None
