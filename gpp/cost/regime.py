"""What a strategy says of time and memory, beside the problem that it is asked to solve."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from gpp.weights.base import AbstractWeights
from gpp.weights.flush import Flush


@dataclass(frozen=True, slots=True, kw_only=True)
class Regime:
    """Under which rules plans are made and judged.

    Args:
        in_flight: micro-batches that a stage keeps: as many as its distance to the sink asks for (`depth`, 1F1B) or all of the
            mini-batch (`all`, GPipe).
        weights: the versions of the weights that a stage holds.
        minibatches: those between two drains, as planners see it: `Problem.minibatch_size` is then that of all of them together,
            and an update comes for each. 1 where every mini-batch drains.
        assumed_copies: of the weights, wherever a stage's position in the pipeline is not known yet.
    """

    in_flight: Literal["depth", "all"] = "depth"
    weights: AbstractWeights = field(default_factory=Flush)
    minibatches: int = 1
    assumed_copies: int = 1

    @property
    def keeps_all(self) -> bool:
        """Whether a stage keeps every micro-batch between two drains."""
        return self.in_flight == "all"

    def held(self, depth: int, most: int) -> int:
        """Micro-batches in flight at a stage from which `depth` stages lead to the sink, itself included, of `most` in all."""
        return most if self.in_flight == "all" or most < depth else depth
