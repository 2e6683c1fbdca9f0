"""SpecTrain (Chen et al. 2018): passes use weights extrapolated to the moment at which the micro-batch's update is made.

Form 1, the paper's: a forward at stage k looks floor(k/2) + W(k) updates ahead, the backward floor(k/2), both aiming at the version
that the model has when the micro-batch has come back to the first stage. Form 2, the authors' code: the forward looks W(k) updates
ahead, and what it used is kept for the backward. The constants of form 1 assume forwards as long as backwards.
"""

from __future__ import annotations

from typing import Literal, final

from gpp.mechanisms.weight_versions.base import AbstractVersionPolicy, Backward
from gpp.mechanisms.weight_versions.costs import Predictor
from gpp.settings import settings
from gpp.weights.base import PipelinePosition


@final
@settings("strategy.weights")
class SpecTrain(AbstractVersionPolicy):
    """W - s * lr * v, with v the smoothed gradient: SGD's momentum, or another optimizer's step without its rate.

    Args:
        form: 1 as in the paper, 2 as in the authors' code.
        nesterov: SGD's momentum u v + g in place of v, as in the authors' code, which has the last gradient g twice.
    """

    form: Literal[1, 2] = 1
    nesterov: bool = False

    @property
    def predictor(self) -> Predictor:
        return Predictor(nesterov=self.nesterov)

    @property
    def backward(self) -> Backward:
        return "predicted" if self.form == 1 else "same"

    def horizon(self, position: PipelinePosition, microbatch: int, start: int = 0) -> int:
        own = position.batch(microbatch) - position.latest(microbatch, start)
        return own + self.backward_horizon(position)

    def backward_horizon(self, position: PipelinePosition) -> int:
        return position.stages_before // 2 // position.accumulation if self.form == 1 else 0
