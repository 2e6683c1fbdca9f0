"""PipeOptim (arXiv 2312.00839): a forward uses weights that the optimizer's own rule predicts for its backward.

The backward then goes through the real weights, which the prediction was meant to hit, so nothing is kept but one scratch copy. The
gradient of the parameters comes from the forward's activations: it is exact if the prediction is.
"""

from __future__ import annotations

from typing import Literal, final

from gpp.errors import InvalidConfig
from gpp.mechanisms.weight_versions.base import AbstractVersionPolicy, Backward
from gpp.mechanisms.weight_versions.costs import Predictor
from gpp.settings import settings
from gpp.weights.base import PipelinePosition


@final
@settings("strategy.weights")
class PipeOptim(AbstractVersionPolicy):
    """W - s * lr * dW, with dW the optimizer's last step without its rate.

    Args:
        horizon_from: `schedule`: s is the number of updates that the schedule really makes between forward and backward;
            `constant`: as published, W(k) always, also while the pipeline fills.
        offset: added to s: 0 as in the paper, 1 as in the authors' code, where the last stage predicts one update ahead too.
        nesterov: SGD's momentum u v + g in place of v, as in the authors' code, which has the last gradient g twice.
        future: gradients to come: `same`: steps go on as the last one did, as published; `zero`: momentum decays without new
            gradients (exact for SGD with momentum if there are none).
        decay: whether decoupled weight decay is part of the prediction (exact); False as published.
    """

    horizon_from: Literal["schedule", "constant"] = "schedule"
    offset: Literal[0, 1] = 0
    future: Literal["same", "zero"] = "same"
    decay: bool = False
    nesterov: bool = False

    def __post_init__(self) -> None:
        if self.nesterov and self.future == "zero":
            rule = "adds the last gradient, and strategy.weights.future=zero has no gradients to come"
            raise InvalidConfig("strategy.weights.nesterov", True, rule, "set strategy.weights.future=same")

    @property
    def predictor(self) -> Predictor:
        return Predictor(future=self.future, decay=self.decay, nesterov=self.nesterov)

    @property
    def backward(self) -> Backward:
        return "current"

    def horizon(self, position: PipelinePosition, microbatch: int, start: int = 0) -> int:
        if self.horizon_from == "constant":
            return position.warmup + self.offset
        return position.batch(microbatch) - position.latest(microbatch, start) + self.offset
