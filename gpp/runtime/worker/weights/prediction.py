"""Weights some updates ahead, extrapolated by the optimizer's own rule from its state.

With r_1 .. r_s the rates of the next s updates, v the momentum, m and q Adam's moments after t updates:

    same gradients     SGD      W - sum(r) v
                       Adam     W - sum(r) m' / (sqrt(q') + eps),  m' = m / (1 - b1^t),  q' = q / (1 - b2^t)
                       RMSprop  W - sum(r) d, d the last step's direction (its momentum, if it has one)
    no gradients       SGD      W - sum_j r_j u^j v
                       Adam     W - sum_j r_j b1^j m / ((1 - b1^(t+j)) (sqrt(q / (1 - b2^(t+j))) + eps))
    decoupled decay    W shrinks by the product of (1 - r_j wd), each step by that of the factors after it

Sources: PipeOptim (arXiv 2312.00839), table of update rules; zero future gradients: FTPipe's MSNAG.
The rates are those of the schedule, so a change of the rate within the horizon is part of the prediction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from gpp.errors import InvalidConfig
from gpp.optimizers import SGD, AbstractOptimizer, Adam, RMSprop
from gpp.weights.base import Predictor

DIRECTION = "direction"
"""Slot of the optimizer's state with the last step's direction, where it keeps none by itself."""

Predict = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor], Sequence[float]], None]
"""(where to, parameters, rates of the coming updates). Without any update so far it copies."""


def predictor(spec: AbstractOptimizer, optimizer: torch.optim.Optimizer, rule: Predictor) -> Predict:
    """The extrapolation for an optimizer.

    Args:
        rule: what a weight policy says of coming gradients and of weight decay.

    Raises:
        InvalidConfig: an optimizer without a rule here.
    """

    def plain(out: torch.Tensor, param: torch.Tensor, rates: Sequence[float]) -> None:
        out.copy_(param)

    def along(slot: str) -> Callable[[torch.Tensor, torch.Tensor, Sequence[float]], None]:
        def momentum(out: torch.Tensor, param: torch.Tensor, rates: Sequence[float]) -> None:
            torch.add(param, optimizer.state[param][slot], alpha=-weighed(rates), out=out)

        return momentum

    def weighed(rates: Sequence[float]) -> float:
        if rule.future == "same":
            return sum(rates)
        keeps = getattr(spec, "momentum", 0.0)
        return sum(rate * keeps**j for j, rate in enumerate(rates, 1))

    if isinstance(spec, Adam):
        one = _Adam(spec, optimizer, rule)
    elif isinstance(spec, SGD | RMSprop):
        kept = "momentum_buffer" if spec.keeps_direction else DIRECTION
        one = plain if rule.future == "zero" and not spec.keeps_direction else along(kept)
    else:
        lacks = "has no rule to predict weights by"
        raise InvalidConfig("optimizer", type(spec).__name__, lacks, "use sgd, adam, adamw or rmsprop, or strategy/weights=stash")

    def predict(out: Sequence[torch.Tensor], params: Sequence[torch.Tensor], rates: Sequence[float]) -> None:
        with torch.no_grad():
            for into, param in zip(out, params, strict=True):
                (one if rates and optimizer.state.get(param) else plain)(into, param, rates)

    return predict


class _Adam:
    def __init__(self, spec: Adam, optimizer: torch.optim.Optimizer, rule: Predictor) -> None:
        self.spec, self.optimizer, self.future = spec, optimizer, rule.future
        self.shrinks = spec.weight_decay if rule.decay and spec.decoupled else 0.0

    def __call__(self, out: torch.Tensor, param: torch.Tensor, rates: Sequence[float]) -> None:
        first, second = self.spec.betas
        kept = self.optimizer.state[param]
        step, mean, square = float(kept["step"]), kept["exp_avg"], kept["exp_avg_sq"]
        factors = [1.0 - rate * self.shrinks for rate in rates]
        after = [_product(factors[j + 1 :]) for j in range(len(rates))]
        if self.shrinks:
            torch.mul(param, _product(factors), out=out)
        else:
            out.copy_(param)
        if self.future == "same":
            total = sum(rate * left for rate, left in zip(rates, after, strict=True))
            out.addcdiv_(mean, self._root(square, 1.0 - second**step), value=-total / (1.0 - first**step))
            return
        for j, (rate, left) in enumerate(zip(rates, after, strict=True), 1):
            value = -rate * left * first**j / (1.0 - first ** (step + j))
            out.addcdiv_(mean, self._root(square, 1.0 - second ** (step + j)), value=value)

    def _root(self, square: torch.Tensor, correction: float) -> torch.Tensor:
        return square.sqrt().div_(correction**0.5).add_(self.spec.eps)


def _product(factors: Sequence[float]) -> float:
    out = 1.0
    for factor in factors:
        out *= factor
    return out


def keep_direction(spec: AbstractOptimizer, optimizer: torch.optim.Optimizer, params: Sequence[torch.Tensor]) -> None:
    """After an update whose state does not tell where it went: keep that, for predictions."""
    with torch.no_grad():
        for param in params:
            if param.grad is None:
                continue
            kept = optimizer.state[param]
            into = kept.setdefault(DIRECTION, torch.empty_like(param))
            into.copy_(param.grad)
            if isinstance(spec, RMSprop):
                into.div_(kept["square_avg"].sqrt().add_(spec.eps))
