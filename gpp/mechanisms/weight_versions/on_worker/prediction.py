"""Weights some updates ahead, extrapolated by the optimizer's own rule from its state.

With r_1 .. r_s the rates of the next s updates, v the momentum, m and q Adam's moments after t updates, q also RMSprop's mean
square, c the coupled weight decay (L2), and g the last gradient with its decay in it:

    same gradients     SGD      W - sum(r) v; without momentum v = g; `nesterov`: u v + g in place of v
                       Adam     W - sum(r) m' / (sqrt(q') + eps),  m' = m / (1 - b1^t),  q' = q / (1 - b2^t)
                       RMSprop  W - sum(r) v; without momentum v = g / (sqrt(q) + eps)
                       NAdam, Muon    W - sum(r) d, with d the last step over its rate, L2 decay in it, decoupled decay not
    no gradients       SGD      W_j = W_(j-1) - r_j v_j,  v_j = u v_(j-1) + c W_(j-1)
                       Adam     W_j = W_(j-1) - r_j m_j / ((1 - b1^(t+j)) (sqrt(q / (1 - b2^(t+j))) + eps)),
                                m_j = b1 m_(j-1) + (1 - b1) c W_(j-1)
                       NAdam    as Adam with n_(j+1) / (1 - P_j n_(j+1)) m_j in place of m_j / (1 - b1^(t+j)), plus
                                (1 - n_j) / (1 - P_j) c W_(j-1), with n_j the momentum of update j and P_j the product up to it
                       RMSprop  as SGD with c / (sqrt(q) + eps) in place of c
    decoupled decay    W shrinks by the product of (1 - r_j wd), each step by that of the factors after it

Second moments stay as they are. Sources: PipeOptim (arXiv 2312.00839), table of update rules; u v + g: the code of PipeOptim and of
SpecTrain; zero future gradients: FTPipe's MSNAG. The rates are those of the schedule, so a change of the rate within the horizon is
part of the prediction. What a prediction moves and keeps is what `costs.py` says.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from gpp.errors import InvalidConfig
from gpp.mechanisms.weight_versions.costs import Predictor
from gpp.optimizers import SGD, AbstractOptimizer, Adam, Muon, NAdam, RMSprop

foreach: Any = torch
"""torch, whose functions over lists of tensors have no declared types."""

DIRECTION = "direction"
"""Slot of the optimizer's state with the last step's gradient, decay and scale included, where a prediction needs it."""

Predict = Callable[[Sequence[Tensor], Sequence[float]], list[Tensor]]
"""(parameters, rates of the coming updates) -> their values then, in memory of their own. Without any update so far it copies."""

Rule = Callable[[list[Tensor], list[dict[str, Any]], Sequence[float]], list[Tensor]]
"""The same of parameters that have been updated, given the optimizer's states of them."""


def predictor(spec: AbstractOptimizer, optimizer: torch.optim.Optimizer, rule: Predictor) -> Predict:
    """The extrapolation for an optimizer: each of its operators goes over all parameters at once.

    Args:
        rule: what a weight policy says of coming gradients and of weight decay.

    Raises:
        InvalidConfig: an optimizer without a rule here.
    """
    rules: dict[type, dict[str, Callable[..., Rule]]] = {
        SGD: {"same": _go_on, "zero": _sgd_runs_out},
        RMSprop: {"same": _go_on, "zero": _rmsprop_runs_out},
        Adam: {"same": _adam_goes_on, "zero": _adam_runs_out},
        NAdam: {"same": _repeat, "zero": _nadam_runs_out},
        Muon: {"same": _repeat},
    }
    if rule.future not in rules.get(type(spec), {}):
        lacks = f"has no rule to predict weights by, for future={rule.future}"
        raise InvalidConfig("optimizer", type(spec).__name__, lacks, "use sgd, adam, adamw or rmsprop, or strategy/weights=stash")
    many = rules[type(spec)][rule.future](spec, rule)
    stateless = isinstance(spec, SGD) and not spec.momentum and rule.future == "zero"

    def predict(params: Sequence[Tensor], rates: Sequence[float]) -> list[Tensor]:
        known = [i for i, p in enumerate(params) if rates and (stateless or optimizer.state.get(p))]
        return _where_known(many, optimizer, params, known, rates)

    return predict


def _where_known(
    many: Rule, optimizer: torch.optim.Optimizer, params: Sequence[Tensor], known: list[int], rates: Sequence[float]
) -> list[Tensor]:
    """The values of parameters by a rule; a copy of those that no gradient has reached so far.

    Args:
        known: the numbers of the others.
    """
    with torch.no_grad():
        values = [param.data for param in params]
        made = many([values[i] for i in known], [optimizer.state[params[i]] for i in known], rates) if known else []
        if len(known) == len(values):
            return made
        out = copied(values)
        for i, tensor in zip(known, made, strict=True):
            out[i] = tensor
        return out


def copied(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The values of tensors, in memory of their own."""
    out = [torch.empty_like(tensor, requires_grad=False) for tensor in tensors]
    if out:
        foreach._foreach_copy_(out, list(tensors))
    return out


def _go_on(spec: SGD | RMSprop, rule: Predictor) -> Rule:
    slot = "momentum_buffer" if spec.momentum else DIRECTION
    nesterov = isinstance(spec, SGD) and spec.momentum and rule.nesterov

    def along(params: list[Tensor], states: list[dict[str, Any]], rates: Sequence[float]) -> list[Tensor]:
        rate = sum(rates)
        out = list(foreach._foreach_add(params, [s[slot] for s in states], alpha=-rate * (spec.momentum if nesterov else 1.0)))
        if nesterov:
            foreach._foreach_add_(out, [s[DIRECTION] for s in states], alpha=-rate)
        return out

    return along


def _sgd_runs_out(spec: SGD, rule: Predictor) -> Rule:
    def run_out(params: list[Tensor], states: list[dict[str, Any]], rates: Sequence[float]) -> list[Tensor]:
        # Weights and momentum stay sums of the present ones: (share of the weights, share of the momentum).
        weights, momentum = (1.0, 0.0), (0.0, 1.0)
        for rate in rates:
            momentum = tuple(spec.momentum * v + spec.weight_decay * w for v, w in zip(momentum, weights, strict=True))
            weights = tuple(w - rate * v for v, w in zip(momentum, weights, strict=True))
        if not spec.momentum:
            return list(foreach._foreach_mul(params, weights[0]))
        buffers = [s["momentum_buffer"] for s in states]
        if not spec.weight_decay:
            return list(foreach._foreach_add(params, buffers, alpha=weights[1]))
        out = list(foreach._foreach_mul(params, weights[0]))
        foreach._foreach_add_(out, buffers, alpha=weights[1])
        return out

    return run_out


def _rmsprop_runs_out(spec: RMSprop, rule: Predictor) -> Rule:
    def run_out(params: list[Tensor], states: list[dict[str, Any]], rates: Sequence[float]) -> list[Tensor]:
        buffers = [s["momentum_buffer"] for s in states] if spec.momentum else []
        if not spec.weight_decay:
            if not spec.momentum:
                return copied(params)
            total = sum(rate * spec.momentum**j for j, rate in enumerate(rates, 1))
            return list(foreach._foreach_add(params, buffers, alpha=-total))
        out = copied(params)
        roots = _roots([s["square_avg"] for s in states], [spec.eps] * len(states))
        velocities = copied(buffers)
        if not spec.momentum:
            velocities = [torch.empty_like(param) for param in params]
            foreach._foreach_zero_(velocities)
        for rate in rates:
            foreach._foreach_mul_(velocities, spec.momentum)
            foreach._foreach_addcdiv_(velocities, out, roots, value=spec.weight_decay)
            foreach._foreach_add_(out, velocities, alpha=-rate)
        return out

    return run_out


def _roots(squares: list[Tensor], shifts: list[float]) -> list[Tensor]:
    roots = list(foreach._foreach_sqrt(squares))
    foreach._foreach_add_(roots, shifts)
    return roots


def decoupled_decay(spec: AbstractOptimizer) -> float:
    """The decoupled decay: an update subtracts it, times the rate, times the weights, beside its step."""
    if isinstance(spec, Muon):
        return spec.weight_decay
    return spec.weight_decay if isinstance(spec, Adam | NAdam) and spec.decoupled else 0.0


class _Decay:
    """Decoupled decay over the coming updates: it leaves `whole` of the weights, and `left` of each step."""

    def __init__(self, spec: AbstractOptimizer, rule: Predictor, rates: Sequence[float]) -> None:
        shrinks = decoupled_decay(spec) if rule.decay else 0.0
        factors = [1.0 - rate * shrinks for rate in rates]
        self.whole, self.left = math.prod(factors), [math.prod(factors[j + 1 :]) for j in range(len(rates))]
        self.shrinks = shrinks > 0

    def applied(self, params: list[Tensor]) -> list[Tensor]:
        """The weights without any step."""
        return list(foreach._foreach_mul(params, self.whole)) if self.shrinks else copied(params)


def _adam_goes_on(spec: Adam, rule: Predictor) -> Rule:
    first, second = spec.betas

    def go_on(params: list[Tensor], states: list[dict[str, Any]], rates: Sequence[float]) -> list[Tensor]:
        decay, steps = _Decay(spec, rule, rates), [float(s["step"]) for s in states]
        total = sum(rate * left for rate, left in zip(rates, decay.left, strict=True))
        corrections = [math.sqrt(1.0 - second**step) for step in steps]
        # m' / (sqrt(q') + eps) with the correction of q in the numerator, which saves a pass.
        roots = _roots([s["exp_avg_sq"] for s in states], [spec.eps * correction for correction in corrections])
        values = [-total * correction / (1.0 - first**step) for correction, step in zip(corrections, steps, strict=True)]
        means = [s["exp_avg"] for s in states]
        if not decay.shrinks:
            return list(foreach._foreach_addcdiv(params, means, roots, scalars=values))
        out = decay.applied(params)
        foreach._foreach_addcdiv_(out, means, roots, scalars=values)
        return out

    return go_on


def _adam_runs_out(spec: Adam, rule: Predictor) -> Rule:
    (first, second), pulls = spec.betas, spec.weight_decay > 0 and not spec.decoupled

    def run_out(params: list[Tensor], states: list[dict[str, Any]], rates: Sequence[float]) -> list[Tensor]:
        decay, steps = _Decay(spec, rule, rates), [float(s["step"]) for s in states]
        means, squares = [s["exp_avg"] for s in states], [s["exp_avg_sq"] for s in states]
        out = decay.applied(params)
        means = copied(means) if pulls else means
        for j, (rate, left) in enumerate(zip(rates, decay.left, strict=True), 1):
            if pulls:
                foreach._foreach_mul_(means, first)
                foreach._foreach_add_(means, out, alpha=(1.0 - first) * spec.weight_decay)
            corrections = [math.sqrt(1.0 - second ** (step + j)) for step in steps]
            runs = 1.0 if pulls else first**j
            values = [
                -rate * left * runs * correction / (1.0 - first ** (step + j))
                for correction, step in zip(corrections, steps, strict=True)
            ]
            roots = _roots(squares, [spec.eps * correction for correction in corrections])
            foreach._foreach_addcdiv_(out, means, roots, scalars=values)
        return out

    return run_out


def _repeat(spec: NAdam | Muon, rule: Predictor) -> Rule:
    def repeat(params: list[Tensor], states: list[dict[str, Any]], rates: Sequence[float]) -> list[Tensor]:
        decay, directions = _Decay(spec, rule, rates), [s[DIRECTION] for s in states]
        total = sum(rate * left for rate, left in zip(rates, decay.left, strict=True))
        if not decay.shrinks:
            return list(foreach._foreach_add(params, directions, alpha=-total))
        out = decay.applied(params)
        foreach._foreach_add_(out, directions, alpha=-total)
        return out

    return repeat


def _nadam_runs_out(spec: NAdam, rule: Predictor) -> Rule:
    (first, second), pulls = spec.betas, spec.weight_decay > 0 and not spec.decoupled

    def momentum(update: float) -> float:
        return first * (1.0 - 0.5 * 0.96 ** (update * spec.momentum_decay))

    def run_out(params: list[Tensor], states: list[dict[str, Any]], rates: Sequence[float]) -> list[Tensor]:
        decay, steps = _Decay(spec, rule, rates), [float(s["step"]) for s in states]
        means, squares = [s["exp_avg"] for s in states], [s["exp_avg_sq"] for s in states]
        products = [float(s["mu_product"]) for s in states]
        out = decay.applied(params)
        means = copied(means) if pulls else means
        for j, (rate, left) in enumerate(zip(rates, decay.left, strict=True), 1):
            updates = [step + j for step in steps]
            products = [product * momentum(update) for product, update in zip(products, updates, strict=True)]
            corrections = [-rate * left * math.sqrt(1.0 - second**update) for update in updates]
            roots = _roots(squares, [spec.eps * math.sqrt(1.0 - second**update) for update in updates])
            if pulls:
                foreach._foreach_mul_(means, first)
                foreach._foreach_add_(means, out, alpha=(1.0 - first) * spec.weight_decay)
                shares = [(1.0 - momentum(u)) / (1.0 - p) * spec.weight_decay for u, p in zip(updates, products, strict=True)]
                values = [c * share for c, share in zip(corrections, shares, strict=True)]
                foreach._foreach_addcdiv_(out, out, roots, scalars=values)
            ahead = [momentum(update + 1) for update in updates]
            shares = [(1.0 if pulls else first**j) * n / (1.0 - p * n) for n, p in zip(ahead, products, strict=True)]
            values = [c * share for c, share in zip(corrections, shares, strict=True)]
            foreach._foreach_addcdiv_(out, means, roots, scalars=values)
        return out

    return run_out


@contextmanager
def direction_kept(spec: AbstractOptimizer, optimizer: torch.optim.Optimizer, params: Sequence[Tensor]) -> Iterator[None]:
    """Keep the direction of an update whose state does not tell it, for predictions. This is a context around the update."""
    moved = [param for param in params if param.grad is not None]
    if not moved:
        yield
        return
    whole, rate = isinstance(spec, NAdam | Muon), float(optimizer.param_groups[0]["lr"])
    with torch.no_grad():
        grads, values = [param.grad for param in moved if param.grad is not None], [param.data for param in moved]
        if whole:
            directions = list(foreach._foreach_mul(values, 1.0 - rate * decoupled_decay(spec)))
        else:
            directions = list(foreach._foreach_add(grads, values, alpha=spec.weight_decay)) if spec.weight_decay else copied(grads)
    yield
    with torch.no_grad():
        if whole:
            foreach._foreach_sub_(directions, values)
            foreach._foreach_div_(directions, rate)
        elif isinstance(spec, RMSprop):
            foreach._foreach_div_(
                directions, _roots([optimizer.state[param]["square_avg"] for param in moved], [spec.eps] * len(moved))
            )
        for param, direction in zip(moved, directions, strict=True):
            # Not before the step: torch takes a parameter without any state for a new one.
            optimizer.state[param][DIRECTION] = direction


DRIFT = "drift"
"""Slot of the optimizer's state with the running mean of a parameter's changes."""


@contextmanager
def changes_kept(
    optimizer: torch.optim.Optimizer, slot: str, params: Sequence[Tensor], memory: float, *, squared: bool = False
) -> Iterator[None]:
    """Take what an update changes, or its square, into a running mean in a slot of the optimizer's state. This is a context around
    the update.

    Args:
        memory: weight of the past.
    """
    moved = [param for param in params if param.grad is not None]
    before = copied([param.data for param in moved])
    yield
    if not moved:
        return
    with torch.no_grad():
        changes = list(foreach._foreach_sub([param.data for param in moved], before))
        states = [optimizer.state[param] for param in moved]
        for state, change in zip(states, changes, strict=True):
            if slot not in state:
                state[slot] = torch.zeros_like(change)
        means = [state[slot] for state in states]
        foreach._foreach_mul_(means, memory)
        if squared:
            foreach._foreach_addcmul_(means, changes, changes, value=1.0 - memory)
        else:
            foreach._foreach_add_(means, changes, alpha=1.0 - memory)


def along_the_drift(optimizer: torch.optim.Optimizer, params: Sequence[Tensor], horizon: int) -> list[Tensor]:
    """The weights so many updates ahead, which is below 0 for those behind, in memory of their own."""

    def along(values: list[Tensor], states: list[dict[str, Any]], rates: Sequence[float]) -> list[Tensor]:
        return list(foreach._foreach_add(values, [state[DRIFT] for state in states], alpha=horizon))

    known = [i for i, param in enumerate(params) if DRIFT in optimizer.state.get(param, {})]
    return _where_known(along, optimizer, params, known, ())
