"""Weights some updates ahead, extrapolated by the optimizer's own rule from its state.

With r_1 .. r_s the rates of the next s updates, v the momentum, m and q Adam's moments after t updates, q also RMSprop's mean
square, c the coupled weight decay (L2), and g the last gradient with its decay in it:

    same gradients     SGD      W - sum(r) v; without momentum v = g; `nesterov`: u v + g in place of v
                       Adam     W - sum(r) m' / (sqrt(q') + eps),  m' = m / (1 - b1^t),  q' = q / (1 - b2^t)
                       RMSprop  W - sum(r) v; without momentum v = g / (sqrt(q) + eps)
    no gradients       SGD      W_j = W_(j-1) - r_j v_j,  v_j = u v_(j-1) + c W_(j-1)
                       Adam     W_j = W_(j-1) - r_j m_j / ((1 - b1^(t+j)) (sqrt(q / (1 - b2^(t+j))) + eps)),
                                m_j = b1 m_(j-1) + (1 - b1) c W_(j-1)
                       RMSprop  as SGD with c / (sqrt(q) + eps) in place of c
    decoupled decay    W shrinks by the product of (1 - r_j wd), each step by that of the factors after it

Second moments stay as they are. Sources: PipeOptim (arXiv 2312.00839), table of update rules; u v + g: the code of PipeOptim and of
SpecTrain; zero future gradients: FTPipe's MSNAG. The rates are those of the schedule, so a change of the rate within the horizon is
part of the prediction. What a prediction moves and keeps is what `AbstractOptimizer.extrapolation` says.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from gpp.errors import InvalidConfig
from gpp.optimizers import SGD, AbstractOptimizer, Adam, RMSprop
from gpp.weights.base import Predictor

DIRECTION = "direction"
"""Slot of the optimizer's state with the last step's gradient, decay and scale included, where a prediction needs it."""

Predict = Callable[[Sequence[Tensor], Sequence[Tensor], Sequence[float]], None]
"""(where to, parameters, rates of the coming updates). Without any update so far it copies."""

One = Callable[[Tensor, Tensor, Sequence[float]], None]
"""The same of one parameter."""


def predictor(spec: AbstractOptimizer, optimizer: torch.optim.Optimizer, rule: Predictor) -> Predict:
    """The extrapolation for an optimizer.

    Args:
        rule: what a weight policy says of coming gradients and of weight decay.

    Raises:
        InvalidConfig: an optimizer without a rule here.
    """
    rules: dict[type, dict[str, Callable[..., One]]] = {
        SGD: {"same": _go_on, "zero": _sgd_runs_out},
        RMSprop: {"same": _go_on, "zero": _rmsprop_runs_out},
        Adam: {"same": _adam_goes_on, "zero": _adam_runs_out},
    }
    if type(spec) not in rules:
        lacks = "has no rule to predict weights by"
        raise InvalidConfig("optimizer", type(spec).__name__, lacks, "use sgd, adam, adamw or rmsprop, or strategy/weights=stash")
    one = rules[type(spec)][rule.future](spec, optimizer, rule)
    stateless = isinstance(spec, SGD) and not spec.momentum and rule.future == "zero"

    def predict(out: Sequence[Tensor], params: Sequence[Tensor], rates: Sequence[float]) -> None:
        with torch.no_grad():
            for into, param in zip(out, params, strict=True):
                if rates and (stateless or optimizer.state.get(param)):
                    one(into, param, rates)
                else:
                    into.copy_(param)

    return predict


def _go_on(spec: SGD | RMSprop, optimizer: torch.optim.Optimizer, rule: Predictor) -> One:
    slot = "momentum_buffer" if spec.momentum else DIRECTION

    def along(out: Tensor, param: Tensor, rates: Sequence[float]) -> None:
        state, rate = optimizer.state[param], sum(rates)
        if isinstance(spec, SGD) and spec.momentum and rule.nesterov:
            torch.add(param, state[slot], alpha=-rate * spec.momentum, out=out)
            out.add_(state[DIRECTION], alpha=-rate)
        else:
            torch.add(param, state[slot], alpha=-rate, out=out)

    return along


def _sgd_runs_out(spec: SGD, optimizer: torch.optim.Optimizer, rule: Predictor) -> One:
    def run_out(out: Tensor, param: Tensor, rates: Sequence[float]) -> None:
        # Weights and momentum stay sums of the present ones: (share of the weights, share of the momentum).
        weights, momentum = (1.0, 0.0), (0.0, 1.0)
        for rate in rates:
            momentum = tuple(spec.momentum * v + spec.weight_decay * w for v, w in zip(momentum, weights, strict=True))
            weights = tuple(w - rate * v for v, w in zip(momentum, weights, strict=True))
        if not spec.momentum:
            torch.mul(param, weights[0], out=out)
        elif not spec.weight_decay:
            torch.add(param, optimizer.state[param]["momentum_buffer"], alpha=weights[1], out=out)
        else:
            torch.mul(param, weights[0], out=out)
            out.add_(optimizer.state[param]["momentum_buffer"], alpha=weights[1])

    return run_out


def _rmsprop_runs_out(spec: RMSprop, optimizer: torch.optim.Optimizer, rule: Predictor) -> One:
    def run_out(out: Tensor, param: Tensor, rates: Sequence[float]) -> None:
        state = optimizer.state[param]
        if not spec.weight_decay:
            if spec.momentum:
                total = sum(rate * spec.momentum**j for j, rate in enumerate(rates, 1))
                torch.add(param, state["momentum_buffer"], alpha=-total, out=out)
            else:
                out.copy_(param)
            return
        out.copy_(param)
        root = state["square_avg"].sqrt().add_(spec.eps)
        velocity = state["momentum_buffer"].clone() if spec.momentum else torch.zeros_like(param)
        for rate in rates:
            velocity.mul_(spec.momentum).addcdiv_(out, root, value=spec.weight_decay)
            out.add_(velocity, alpha=-rate)

    return run_out


class _Decay:
    """Decoupled decay over the coming updates: it leaves `whole` of the weights, and `left` of each step."""

    def __init__(self, spec: Adam, rule: Predictor, rates: Sequence[float]) -> None:
        shrinks = spec.weight_decay if rule.decay and spec.decoupled else 0.0
        factors = [1.0 - rate * shrinks for rate in rates]
        self.whole, self.left = math.prod(factors), [math.prod(factors[j + 1 :]) for j in range(len(rates))]
        self.shrinks = shrinks > 0

    def apply(self, out: Tensor, param: Tensor) -> None:
        """Write the weights without any step."""
        if self.shrinks:
            torch.mul(param, self.whole, out=out)
        else:
            out.copy_(param)


def _adam_goes_on(spec: Adam, optimizer: torch.optim.Optimizer, rule: Predictor) -> One:
    first, second = spec.betas

    def go_on(out: Tensor, param: Tensor, rates: Sequence[float]) -> None:
        state, decay = optimizer.state[param], _Decay(spec, rule, rates)
        step, total = float(state["step"]), sum(rate * left for rate, left in zip(rates, decay.left, strict=True))
        correction = math.sqrt(1.0 - second**step)
        # m' / (sqrt(q') + eps) with the correction of q in the numerator, which saves a pass.
        root, value = state["exp_avg_sq"].sqrt().add_(spec.eps * correction), -total * correction / (1.0 - first**step)
        if decay.shrinks:
            decay.apply(out, param)
            out.addcdiv_(state["exp_avg"], root, value=value)
        else:
            torch.addcdiv(param, state["exp_avg"], root, value=value, out=out)

    return go_on


def _adam_runs_out(spec: Adam, optimizer: torch.optim.Optimizer, rule: Predictor) -> One:
    (first, second), pulls = spec.betas, spec.weight_decay > 0 and not spec.decoupled

    def run_out(out: Tensor, param: Tensor, rates: Sequence[float]) -> None:
        state, decay = optimizer.state[param], _Decay(spec, rule, rates)
        step, mean, square = float(state["step"]), state["exp_avg"], state["exp_avg_sq"]
        decay.apply(out, param)
        mean = mean.clone() if pulls else mean
        for j, (rate, left) in enumerate(zip(rates, decay.left, strict=True), 1):
            if pulls:
                mean.mul_(first).add_(out, alpha=(1.0 - first) * spec.weight_decay)
            correction = math.sqrt(1.0 - second ** (step + j))
            runs = 1.0 if pulls else first**j
            value = -rate * left * runs * correction / (1.0 - first ** (step + j))
            out.addcdiv_(mean, square.sqrt().add_(spec.eps * correction), value=value)

    return run_out


@contextmanager
def direction_kept(spec: AbstractOptimizer, optimizer: torch.optim.Optimizer, params: Sequence[Tensor]) -> Iterator[None]:
    """Around an update whose state does not tell where it goes: keep that, for predictions."""
    kept: dict[Tensor, Tensor] = {}
    with torch.no_grad():
        for param in params:
            if param.grad is None:
                continue
            into = optimizer.state.get(param, {}).get(DIRECTION)
            kept[param] = into = torch.empty_like(param) if into is None else into
            if spec.weight_decay:
                torch.add(param.grad, param, alpha=spec.weight_decay, out=into)
            else:
                into.copy_(param.grad)
    yield
    with torch.no_grad():
        for param, direction in kept.items():
            # Not before the step: torch takes a parameter without any state for a new one.
            optimizer.state[param][DIRECTION] = direction
            if isinstance(spec, RMSprop):
                direction.div_(optimizer.state[param]["square_avg"].sqrt().add_(spec.eps))
