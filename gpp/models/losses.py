"""Losses and metrics by name, each the mean over the samples of a micro-batch.

Because each is a mean over samples, the loss of a mini-batch is the sample-weighted mean of the losses of
its micro-batches, however it was cut. A loss that couples the samples of a batch is no such mean; see `loss.scope`.

    outputs   Tensor [B, ...], or a tuple or dict of such
    targets   Tensor [B, ...], or a dict of such
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpp.errors import CaptureError, InvalidConfig
from gpp.graph.captured import LOSS
from gpp.models.dotted import nearest, resolve

Measure: TypeAlias = Callable[[Any, Any], Tensor]
Loss: TypeAlias = Callable[[Any, Any], Tensor | Mapping[str, Tensor]]
"""A scalar, or named scalar terms whose sum is the loss."""


def loss(name: str) -> Loss:
    """The loss called `name`: `(outputs, targets) -> scalar`, mean over samples, or a dict of such terms.

    The terms of a dict, each multiplied by its weight already, sum up to the loss. They may end in different stages,
    where each is differentiated by itself, and each is recorded under its name.

    Args:
        name: `cross_entropy`, `mse`, `bce_with_logits`, or the dotted path of a function. That function gets
            the outputs as the network returned them, and as targets the tensor when the model has one target,
            else the dict. Of a class of modules one is made, without arguments; its parameters are trained.

    Raises:
        InvalidConfig: there is no such loss; the fix names the nearest.
    """
    return _measure("model.loss", name, {"cross_entropy": cross_entropy, "mse": mse, "bce_with_logits": bce_with_logits})


def metric(name: str) -> Measure:
    """The metric called `name`: `accuracy`, or the dotted path of a function with the contract of `loss`.

    Raises:
        InvalidConfig: there is no such metric; the fix names the nearest.
    """
    return _measure("model.metric", name, {"accuracy": accuracy})


def loss_terms(value: Any) -> dict[str, Tensor]:
    """The values that a loss function returned, by the names of results: `loss`, or `loss:NAME` for each term.

    Raises:
        CaptureError: the dict is empty, or a term has no name.
    """
    if not isinstance(value, Mapping):
        return {LOSS: value}
    if not value or not all(isinstance(name, str) and name for name in value):
        raise CaptureError(
            f"the loss returned the terms {list(value)}. Fix: return one scalar, or a dict of named scalars, whose sum is the loss"
        )
    return {f"{LOSS}:{name}": term for name, term in value.items()}


def module_of(loss: Any) -> nn.Module | None:
    """The module that a loss is, or a method or a call of which it is with some arguments given; None where it is a plain function.

    Its parameters and buffers are the loss's own: they are called `loss.NAME`.
    """
    while not isinstance(loss, nn.Module):
        inner = getattr(loss, "__wrapped__", None) or getattr(loss, "func", None) or getattr(loss, "__self__", None)
        if inner is None:
            return None
        loss = inner
    return loss


def named_tensors(model: nn.Module, loss: nn.Module | None = None, *, tied: bool = False) -> list[tuple[str, Tensor]]:
    """Parameters, then buffers (non-persistent ones too) by full name; those of a loss that is no part of the model as `loss.NAME`.

    Args:
        tied: whether one that has several names comes under each of them.

    Raises:
        InvalidConfig: the model has tensors under the same names as the loss.
    """
    parts = [("", model)] if loss is None or loss in set(model.modules()) else [("", model), (f"{LOSS}.", loss)]
    out = [(at + name, p) for at, part in parts for name, p in part.named_parameters(remove_duplicate=not tied)]
    out += [(at + name, b) for at, part in parts for name, b in part.named_buffers(remove_duplicate=not tied)]
    names = [name for name, _ in out]
    if len(parts) > 1 and len(set(names)) < len(names):
        rule = "is a module of the model, and the loss's own tensors are called so, too"
        raise InvalidConfig("model.loss", max(names, key=names.count), rule, "call that module of the model otherwise")
    return out


def untrained(loss: Any, model: nn.Module) -> tuple[str, ...]:
    """What a loss that is no module has of trainable parameters beside the model's, by its own names: they become constants."""
    known = {id(param) for part in (model, module_of(loss)) if part is not None for param in part.parameters()}
    while "__wrapped__" in getattr(loss, "__dict__", {}):
        loss = loss.__wrapped__
    if isinstance(loss, nn.Module):
        return ()
    function = getattr(loss, "func", loss)
    used: dict[str, Any] = dict(getattr(loss, "keywords", {}))
    if inspect.isfunction(function):
        found = inspect.getclosurevars(function)
        used |= {**found.globals, **found.nonlocals}
    elif not inspect.isbuiltin(function):
        used |= getattr(function, "__dict__", {})
    out = []
    for name, value in used.items():
        params = [value] if isinstance(value, nn.Parameter) else value.parameters() if isinstance(value, nn.Module) else ()
        if any(param.requires_grad and id(param) not in known for param in params):
            out.append(name)
    return tuple(out)


def called_as(loss: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """A function in the place of a loss, from which `module_of` finds the loss's module."""
    function.__wrapped__ = loss  # type: ignore[attr-defined]  # as functools.wraps, which would copy all that a module holds
    return function


def _measure(field: str, name: str, shipped: Mapping[str, Measure]) -> Measure:
    function: Measure
    if name in shipped:
        function = shipped[name]
    elif "." in str(name):
        function = resolve(name, field=field)
        if not callable(function):
            raise InvalidConfig(field, name, "names something that cannot be called", "name a function of (outputs, targets)")
        if isinstance(function, type) and issubclass(function, nn.Module):
            function = _made(function, field, name)
    else:
        fix = f"{nearest(str(name), shipped)}; or give the dotted path of your own function"
        raise InvalidConfig(field, name, f"must be one of {', '.join(shipped)} or a dotted path", fix)

    def measure(outputs: Any, targets: Any) -> Tensor:
        return function(outputs, only_target(targets))

    return called_as(function, measure)


def _made(kind: type[nn.Module], field: str, name: str) -> nn.Module:
    """A module of a class that needs no arguments.

    Raises:
        InvalidConfig: it needs some.
    """
    try:
        return kind()
    except TypeError as error:
        rule = f"is a class that is made without arguments, and {error}"
        raise InvalidConfig(field, name, rule, "give its arguments defaults, or name a module that you have made") from error


def only_target(targets: Any) -> Any:
    """The tensor of a dict that holds one; anything else as it is."""
    if isinstance(targets, Mapping) and len(targets) == 1:
        return next(iter(targets.values()))
    return targets


def prediction(outputs: Any) -> Tensor:
    """The one tensor [B, ...] that a shipped loss compares: the only output, or the one called `logits`.

    Raises:
        InvalidConfig: there are several outputs, and none is called `logits`.
    """
    if isinstance(outputs, Tensor):
        return outputs
    names = list(outputs) if isinstance(outputs, Mapping) else list(range(len(outputs)))
    if len(names) == 1 or "logits" in names:
        return outputs["logits" if "logits" in names else names[0]]
    fix = "choose one with model.outputs, or give the dotted path of a loss that takes them all"
    raise InvalidConfig("model.loss", f"a shipped loss on outputs {names}", "takes one output", fix)


def cross_entropy(outputs: Any, targets: Tensor) -> Tensor:
    """Softmax cross entropy of logits [B, ..., C] and classes [B, ...] (int64)."""
    return F.cross_entropy(prediction(outputs).flatten(0, -2), targets.flatten())


def mse(outputs: Any, targets: Tensor) -> Tensor:
    """Mean squared difference of two tensors with equal numbers of elements."""
    y = prediction(outputs)
    return F.mse_loss(y, targets.to(y.dtype).view_as(y))


def bce_with_logits(outputs: Any, targets: Tensor) -> Tensor:
    """Binary cross entropy of logits and truths (bool, or probabilities) with equal numbers of elements."""
    y = prediction(outputs)
    return F.binary_cross_entropy_with_logits(y, targets.to(y.dtype).view_as(y))


def accuracy(outputs: Any, targets: Tensor) -> Tensor:
    """Share of right answers in 0..1: the largest of logits [B, ..., C], or the sign when targets are bool."""
    y = prediction(outputs).detach()
    right = (y > 0).view_as(targets) == targets if targets.dtype == torch.bool else y.argmax(-1) == targets
    return right.float().mean()
