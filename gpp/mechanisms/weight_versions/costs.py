"""Amounts of work that predictions of weights take, by the rule of each optimizer (`on_worker/prediction.py` has the formulas)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

from gpp.errors import InvalidConfig
from gpp.optimizers import SGD, AbstractOptimizer, Adam, Muon, NAdam, RMSprop
from gpp.weights.base import NONE, WeightWork

COPY = WeightWork(2.0, 1)
"""A copy reads and writes every byte."""
ADD = WeightWork(3.0, 1)
"""The sum of two lists of tensors: both are read, a third is written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Predictor:
    """How weights are extrapolated with the optimizer's state, beyond the rule of the optimizer itself.

    Args:
        future: gradients to come: `same`: steps go on as the last one did; `zero`: momentum decays without new gradients.
        decay: whether decoupled weight decay is part of the prediction; coupled decay (L2), a part of every gradient, always is.
        nesterov: whether SGD's steps go on along u v + g, momentum u times its buffer plus the last gradient, instead of v.
    """

    future: str = "same"
    decay: bool = False
    nesterov: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Extrapolation:
    """The cost of predictions by an optimizer's rule.

    Args:
        once: work of every prediction.
        each: work of it for each update that it looks ahead.
        kept: bytes kept beside the optimizer's own state, for each byte of the weights.
        update: work at every update to keep them.
    """

    once: WeightWork = ADD
    each: WeightWork = NONE
    kept: float = 0.0
    update: WeightWork = NONE

    def of(self, horizon: int) -> WeightWork:
        """One prediction of so many updates."""
        return self.once + self.each * horizon


ALONG_A_MOMENTUM: Final = Extrapolation()
"""Along the last direction, which the optimizer keeps: this and the weights are read, the prediction is written."""
ALONG_THE_DRIFT: Final = Extrapolation(kept=1.0, update=WeightWork(10.0, 4))
"""Along a running mean of past updates: at each the weights before it are copied, their change is made and taken into the mean."""
ALONG_THE_LAST_STEP: Final = Extrapolation(kept=1.0, update=WeightWork(7.0, 3))
"""Along the last step, which is kept at an update: the weights before it, less those after it, over the rate."""


def extrapolation(optimizer: AbstractOptimizer, rule: Predictor) -> Extrapolation:
    """The cost of predicting weights by a rule: reads and writes of its operators.

    Raises:
        InvalidConfig: there is no such rule for the optimizer.
    """
    if (cost := _COSTS.get(type(optimizer))) is None:
        lacks = "has steps that nothing is known of, and weights are to be predicted along them"
        raise InvalidConfig("optimizer", optimizer.name, lacks, "use gpp.SGD or gpp.Adam, or other weights")
    return cost(optimizer, rule)


def _keeping(weight_decay: float) -> WeightWork:
    """Keeping the last gradient at an update, with the coupled decay in it."""
    return ADD if weight_decay else COPY


def _sgd(own: SGD, rule: Predictor) -> Extrapolation:
    if rule.future == "zero":
        shrunk = WeightWork(2.0, 1)
        return Extrapolation(once=shrunk if not own.momentum else shrunk + ADD if own.weight_decay else ADD)
    if own.momentum and not rule.nesterov:
        return ALONG_A_MOMENTUM
    return Extrapolation(once=ADD * (2 if own.momentum else 1), kept=1.0, update=_keeping(own.weight_decay))


def _adam(own: Adam, rule: Predictor) -> Extrapolation:
    # The root of the second moment goes into scratch and is shifted there; weights, mean and scratch become one tensor.
    step, shrinks = WeightWork(8.0, 3), bool(rule.decay and own.decoupled and own.weight_decay)
    if rule.future == "same":
        return Extrapolation(once=step + COPY * shrinks)
    if own.weight_decay and not own.decoupled:
        return Extrapolation(once=COPY * 2, each=step + WeightWork(5.0, 2))
    return Extrapolation(once=COPY, each=step)


def _rmsprop(own: RMSprop, rule: Predictor) -> Extrapolation:
    if rule.future == "zero":
        if own.weight_decay:
            # Weights copied, a root made and shifted, a velocity copied or filled; then a step of three operators.
            velocity = COPY if own.momentum else WeightWork(1.0, 1)
            return Extrapolation(once=COPY + WeightWork(4.0, 2) + velocity, each=WeightWork(9.0, 3))
        return ALONG_A_MOMENTUM if own.momentum else Extrapolation(once=COPY)
    if own.momentum:
        return ALONG_A_MOMENTUM
    # At the update the gradient is copied, with its decay, and divided by the root of the mean square.
    return Extrapolation(kept=1.0, update=_keeping(own.weight_decay) + WeightWork(7.0, 3))


def _nadam(own: NAdam, rule: Predictor) -> Extrapolation:
    if rule.future == "same":
        shrinks = bool(rule.decay and own.decoupled and own.weight_decay)
        return replace(ALONG_THE_LAST_STEP, once=WeightWork(2.0, 1) + ADD if shrinks else ADD)
    # As Adam's; with L2 decay each update reads the weights once more, as the gradient itself.
    if own.weight_decay and not own.decoupled:
        return Extrapolation(once=COPY * 2, each=WeightWork(16.0, 6))
    return Extrapolation(once=COPY, each=WeightWork(8.0, 3))


def _muon(own: Muon, rule: Predictor) -> Extrapolation:
    if rule.future == "zero":
        lacks = "has no steps without gradients other than its last one, repeated"
        raise InvalidConfig("strategy.weights.future", "zero", f"optimizer=muon {lacks}", "set strategy.weights.future=same")
    return replace(ALONG_THE_LAST_STEP, once=WeightWork(2.0, 1) + ADD if rule.decay and own.weight_decay else ADD)


_COSTS: Final[dict[type, Callable[[Any, Predictor], Extrapolation]]] = {
    SGD: _sgd,
    Adam: _adam,
    RMSprop: _rmsprop,
    NAdam: _nadam,
    Muon: _muon,
}
