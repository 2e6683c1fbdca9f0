"""Gap-aware gradients (Barkai, Hakimi and Schuster, "Gap-Aware Mitigation of Gradient Staleness", ICLR 2020, arXiv 1909.10802).

How far a gradient can be trusted follows from how far the weights have moved since, not from how many updates ago it was:

    g <- g / (1 + |W - W'| / C)

element by element, with W' the weights of the forward and C the size of a usual update. C is here the root of a running mean
of the squared updates really made; the code of FTPipe (Eliad et al., ATC 2021), which brought the method to pipelines, has the
highest rate times the root mean square of SGD's momentum, which is the same while the rate is constant.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, final

from pydantic import Field

from gpp.mechanisms.weight_versions.corrections.base import AbstractCorrection, Cost, Damping
from gpp.settings import Decay, settings
from gpp.weights.base import WeightWork


@final
@settings("strategy.weights.correction")
class GapAware(AbstractCorrection):
    """Smaller gradients where the weights have moved far, for updates after every micro-batch.

    Args:
        memory: weight of the past in the mean of the squared updates.
        eps: added to C, for weights that have not moved.
    """

    name: ClassVar[str] = "gap_aware"
    # Around a backward: the distance, C, their quotient, the division. At an update: the weights before it, the square of their
    # change, the mean.
    cost: ClassVar[Cost] = Cost(backward=WeightWork(19.0, 8), update=WeightWork(10.0, 4), kept=1.0)
    memory: Decay = 0.999
    eps: Annotated[float, Field(gt=0)] = 1e-8

    @property
    def damping(self) -> Damping:
        return Damping(self.memory, self.eps)
