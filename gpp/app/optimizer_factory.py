"""An optimizer by a function of the parameters, as plain settings that every worker makes its own optimizer of.

A worker has the parameters of its stages alone, and is handed no code of the user's program. So the function is called here, and
what it returns is read: its class, by a dotted path, and the settings of each group of parameters. Whether that says all is tried
out on small parameters: the optimizer that a worker makes must take the same steps whether it has all parameters or one of them.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias, final

from gpp.errors import InvalidConfig
from gpp.optimizers import AbstractOptimizer, Adam, ClipNorm, ClipScope, LearningRate
from gpp.runtime.torch_optimizer import Group, TorchOptimizer
from gpp.settings import settings

if TYPE_CHECKING:
    import torch
    from torch import nn

    Factory: TypeAlias = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

STEPS = 3
"""Steps of the trial: what a step leaves behind shows in the next ones."""
MOST = 6
"""Most elements of the trial's parameters along a dimension."""


@final
@settings("optimizer")
class ByFactory:
    """An optimizer by a function, with what the pipeline does around it.

    Args:
        factory: (params) -> torch.optim.Optimizer.
        learning_rate: over the steps, beginning with the optimizer's own; a scheduler of torch's acts on no worker's optimizer.
        clip_norm, clip_scope: as of `gpp.Adam`.
    """

    factory: Any
    learning_rate: LearningRate = LearningRate()
    clip_norm: ClipNorm | None = None
    clip_scope: ClipScope = "model"


def optimizer_of(
    given: AbstractOptimizer | ByFactory | Factory | None, model: nn.Module, loss: nn.Module | None = None
) -> AbstractOptimizer:
    """Settings of an optimizer, or those that a function's optimizer has.

    Args:
        given: None for Adam(lr=1e-3).
        model, loss: the function is called on the parameters of both; they are not changed.

    Raises:
        InvalidConfig: it is neither; a worker cannot make the optimizer by its class and settings; it needs a closure or all
            parameters at once, or leaves some out.
    """
    if given is None or isinstance(given, AbstractOptimizer):
        return given or Adam(lr=1e-3)
    import torch

    from gpp.models.losses import named_tensors

    asked = given if isinstance(given, ByFactory) else ByFactory(factory=given)
    if not callable(asked.factory):
        fix = "say optimizer=gpp.Adam(lr=1e-3), or optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3)"
        raise InvalidConfig("optimizer", asked.factory, "must be settings of an optimizer, or a function that makes one", fix)
    params = {name: p for name, p in named_tensors(model, loss) if isinstance(p, torch.nn.Parameter) and p.requires_grad}
    made: Any = asked.factory(list(params.values()))
    path, lr = _path(made), made.param_groups[0].get("lr")
    if not isinstance(lr, int | float) or lr <= 0:
        rule = f"has the learning rate {lr}, by which those of the other groups are told and which follows the steps"
        raise InvalidConfig("optimizer", path, rule, "say a number above 0, as lr=1e-3; gpp.LearningRate has warm-ups")
    found = TorchOptimizer(
        path=path,
        lr=float(lr),
        groups=_groups(made, params),
        state=0.0,
        learning_rate=asked.learning_rate,
        clip_norm=asked.clip_norm,
        clip_scope=asked.clip_scope,
    )
    together = _small(params)
    own = _stepped(found, together, made)
    for name, param in together.items():
        alone = _small({name: params[name]})
        _stepped(found, alone, made)
        if not alone[name].allclose(param, rtol=1e-12, atol=1e-12):
            rule = "updates a parameter by more than its own gradient, and a worker has the parameters of its stages alone"
            raise InvalidConfig("optimizer", found.path, rule, "use one that updates each by itself, as torch.optim.AdamW")
    held = sum(t.nbytes for entry in own.state.values() for t in entry.values() if hasattr(t, "nbytes") and t.ndim)
    return replace(found, state=held / max(1, sum(p.nbytes for p in together.values())))


def _path(made: Any) -> str:
    """The dotted path of an optimizer's class.

    Raises:
        InvalidConfig: it is no optimizer, is in a place that no worker can import, or needs a closure.
    """
    import torch

    cls = type(made)
    path = f"{cls.__module__}.{cls.__qualname__}"
    if not isinstance(made, torch.optim.Optimizer):
        raise InvalidConfig("optimizer", path, "must be a function that returns a torch.optim.Optimizer", "return one")
    if cls.__module__ == "__main__" or "." in cls.__qualname__:
        rule = "is a class that no other process can import"
        raise InvalidConfig("optimizer", path, rule, "put it at the top level of a module of its own")
    if inspect.signature(cls.step).parameters["closure"].default is inspect.Parameter.empty:
        rule = "needs a closure that computes the loss again, with all parameters at once"
        raise InvalidConfig("optimizer", path, rule, "use one that steps by gradients alone, as torch.optim.AdamW")
    return path


def _groups(made: torch.optim.Optimizer, params: Mapping[str, nn.Parameter]) -> tuple[Group, ...]:
    """The groups of an optimizer with names in place of parameters.

    Raises:
        InvalidConfig: a trained parameter is in none; a setting is no plain value.
    """
    name_of = {id(p): name for name, p in params.items()}
    takes = set(inspect.signature(type(made).__init__).parameters)
    out = []
    for group in made.param_groups:
        values = {name: value for name, value in group.items() if name in takes and name != "params"}
        try:
            plain = json.loads(json.dumps(values))
        except (TypeError, ValueError) as error:
            rule = f"has settings that are no plain numbers or words ({error})"
            raise InvalidConfig("optimizer", type(made).__name__, rule, "say numbers, as lr=1e-3") from error
        out.append(Group(names=tuple(name_of[id(p)] for p in group["params"] if id(p) in name_of), values=plain))
    if missing := set(params) - {name for group in out for name in group.names}:
        rule = f"leaves out {len(missing)} trained parameters, as {min(missing)}"
        raise InvalidConfig("optimizer", type(made).__name__, rule, "give it all, or freeze those (requires_grad=False)")
    return tuple(out)


def _small(params: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """Small parameters of as many dimensions, with values that differ from each other's."""
    import torch

    out = {}
    for name, param in params.items():
        values = torch.arange(1.0, 1.0 + MOST**param.ndim, dtype=torch.float64) + len(name)
        shape = [min(size, MOST) for size in param.shape]
        out[name] = torch.nn.Parameter(values[: math.prod(shape)].reshape(shape).cos())
    return out


def _stepped(found: TorchOptimizer, params: Mapping[str, nn.Parameter], made: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer as a worker makes it, after some steps along gradients that follow from the parameters.

    Raises:
        InvalidConfig: it is another one than the function's.
    """
    try:
        own = found.build_named(params.items())
        for _ in range(STEPS):
            for param in params.values():
                param.grad = param.detach().sin()
            own.step()
    except Exception as error:
        rule = f"cannot be made again by its class and settings, or takes no step: {type(error).__name__}: {error}"
        fix = "use a class that takes its settings by name and gradients as they are, as torch.optim.AdamW"
        raise InvalidConfig("optimizer", found.path, rule, fix) from error

    def plain(one: torch.optim.Optimizer) -> dict[str, Any]:
        return {name: value for name, value in vars(one).items() if isinstance(value, bool | int | float | str)}

    if others := sorted(name for name, value in plain(made).items() if plain(own).get(name) != value):
        rule = f"has {others[0]} beyond the settings of its groups, which a worker's would not have"
        raise InvalidConfig("optimizer", found.path, rule, "use a class whose settings are all in its parameter groups")
    return own
