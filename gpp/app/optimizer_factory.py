"""An optimizer of torch's, as plain settings that every worker makes its own optimizer of.

A worker has the parameters of its stages alone, and is handed no code of the user's program. So an optimizer over the model's
parameters, which is given or made here by the user's function, is read: its class, by a dotted path, and the settings of each group
of parameters. Whether that says all is tried out on small parameters: the optimizer that a worker makes must take the same steps
whether it has all parameters or one of them.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, final

from gpp.errors import InvalidConfig
from gpp.optimizers import AbstractOptimizer, Adam, AroundSteps
from gpp.runtime.torch_optimizer import Group, TorchOptimizer, base_rate, taken_by
from gpp.settings import settings

if TYPE_CHECKING:
    import torch
    from torch import nn

    Factory: TypeAlias = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
    GivenOptimizer: TypeAlias = "AbstractOptimizer | ByFactory | Factory | torch.optim.Optimizer | None"

STEPS = 3
"""Steps of the trial: what a step leaves behind shows in the next ones."""
MOST = 6
"""Most elements of the trial's parameters along a dimension."""
PROBED, SEVERAL = 64, 4
"""Rows and columns of the matrices whose bytes are looked at, and how many there are."""

PLAIN = "use a class whose steps follow from its settings and each parameter's gradient alone, as torch.optim.AdamW"


@final
@settings("optimizer")
class ByFactory(AroundSteps):
    """An optimizer of torch's, with what the pipeline does around its steps.

    Args:
        factory: (params) -> torch.optim.Optimizer, or an optimizer over the model's parameters.
    """

    factory: Any


def optimizer_of(
    given: GivenOptimizer, model: nn.Module, loss: nn.Module | None = None
) -> tuple[AbstractOptimizer, torch.optim.Optimizer | None]:
    """Settings of an optimizer, or those of one of torch's, which is given or which a function makes; and that one.

    Args:
        given: None for Adam(lr=1e-3).
        model, loss: whose parameters the optimizer has, or is given; they are not changed.

    Raises:
        InvalidConfig: it is none of them; a worker cannot make the optimizer by its class and settings; it needs a closure or all
            parameters at once, has other parameters than the model or leaves some out, or has begun.
    """
    if given is None or isinstance(given, AbstractOptimizer):
        return given or Adam(lr=1e-3), None
    import torch

    from gpp.models.losses import named_tensors

    asked = given if isinstance(given, ByFactory) else ByFactory(factory=given)
    names: dict[torch.Tensor, str] = {}
    for name, tensor in named_tensors(model, loss):
        names.setdefault(tensor, name)  # a loss may hold a weight of the model's
    every = {name: p for p, name in names.items() if isinstance(p, torch.nn.Parameter)}
    params = {name: p for name, p in every.items() if p.requires_grad}
    made: Any = asked.factory if isinstance(asked.factory, torch.optim.Optimizer) else _called(asked.factory, params)
    path = _path(made)
    groups = _groups(made, params, {id(p) for p in every.values()})
    around = {setting.name: getattr(asked, setting.name) for setting in fields(AroundSteps)}
    found = TorchOptimizer(path=path, lr=base_rate(groups), groups=groups, state=0.0, **around)
    together = _small(params)
    own = _stepped(found, together)
    new = found.build_named(_small(params).items())
    _check_new(made, new, path)
    # What torch's own classes change in themselves is of no consequence; no checkpoint has what others do.
    _check_plain(made, new if path.startswith("torch.optim.") else own, path)
    for name, param in together.items():
        alone = _small({name: params[name]})
        _stepped(found, alone)
        if not alone[name].allclose(param, rtol=1e-12, atol=1e-12):
            rule = "updates a parameter by more than its own gradient, and a worker has the parameters of its stages alone"
            raise InvalidConfig("optimizer", found.path, rule, "use one that updates each by itself, as torch.optim.AdamW")
    halves = {n: torch.nn.Parameter(p.detach()[: (len(p) + 1) // 2]) for n, p in _small(params).items() if p.ndim}
    _stepped(found, halves)
    whole = any(not half.allclose(together[n][: len(half)], rtol=1e-12, atol=1e-12) for n, half in halves.items())
    # Sizes differ by less in a small model: each parameter's state counts by the bytes that the parameter has.
    held = {param: sum(t.nbytes for t in entry.values() if hasattr(t, "nbytes") and t.ndim) for param, entry in own.state.items()}
    state = sum(params[name].nbytes * held.get(param, 0) / param.nbytes for name, param in together.items() if param.nbytes)
    state /= max(1, sum(p.nbytes for p in params.values()))
    return replace(found, state=state, update=_update_factors(found), whole=whole), made


def _update_factors(found: TorchOptimizer) -> tuple[float, float]:
    """`AbstractOptimizer.update_factors`, as the allocator has them for some square matrices, and for one more; groups step one
    after the other, so that the most of any of them is enough for all."""
    factors = []
    with ThreadPoolExecutor(1) as apart:  # the user's profiler may listen to this thread
        for _, part in found.parts:
            fewer, more = apart.map(partial(_taken, part), (SEVERAL - 1, SEVERAL))
            of_all = max(0.0, round(more - fewer, 2))
            factors.append((of_all, max(0.0, round(more - SEVERAL * of_all, 2))))
    return max(of_all for of_all, _ in factors), max(of_largest for _, of_largest in factors)


def _taken(found: AbstractOptimizer, count: int) -> float:
    """Bytes that a step takes for itself, in matrices, with so many of them to update."""
    import torch

    from gpp.runtime.worker.allocator import MemoryEvents

    params = [torch.nn.Parameter(torch.ones(PROBED, PROBED)) for _ in range(count)]
    for param in params:
        param.grad = torch.ones_like(param)
    made, events = found.build(params), MemoryEvents(lambda allowed: None)
    made.step()
    events.begin([])
    made.step()
    events.end()
    return events.peak_bytes / params[0].nbytes


def _called(factory: Any, params: Mapping[str, nn.Parameter]) -> Any:
    """The optimizer that a function makes of parameters.

    Raises:
        InvalidConfig: it is no function, or it raises an error.
    """
    if not callable(factory):
        fix = "say optimizer=gpp.Adam(lr=1e-3), or optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3)"
        raise InvalidConfig(
            "optimizer", factory, "must be settings of an optimizer, an optimizer, or a function that makes one", fix
        )
    try:
        return factory(list(params.values()))
    except Exception as error:
        name = getattr(factory, "__name__", None) or type(factory).__name__
        rule = f"was called with a list of {len(params)} trained parameters and raised {type(error).__name__}: {error}"
        fix = "let it make one optimizer of all of them, as torch.optim.AdamW does; gpp.Muon has AdamW for what is no matrix"
        raise InvalidConfig("optimizer", name, rule, fix) from error


def _path(made: Any) -> str:
    """The dotted path of an optimizer's class.

    Raises:
        InvalidConfig: it is no optimizer, is in a place that no worker can import, needs a closure, or calls functions.
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
    if any(getattr(made, f"_optimizer_step_{when}_hooks", None) for when in ("pre", "post")):
        rule = "has hooks around its steps, which no worker is handed"
        fix = "take them away; gpp.ByFactory has clipping by the norm of all gradients"
        raise InvalidConfig("optimizer", path, rule, fix)
    return path


def _groups(made: torch.optim.Optimizer, params: Mapping[str, nn.Parameter], known: set[int]) -> tuple[Group, ...]:
    """The groups of an optimizer with names in place of parameters.

    Args:
        params: the trained ones by name.
        known: `id` of all parameters.

    Raises:
        InvalidConfig: a trained parameter is in none; a group has one of something else; see `values_of`.
    """
    name_of, path = {id(p): name for name, p in params.items()}, type(made).__name__
    out, every = [], sum(p.nbytes for p in params.values())
    for number, (group, values) in enumerate(zip(made.param_groups, values_of(made), strict=True)):
        if others := [tuple(p.shape) for p in group["params"] if id(p) not in known and p.requires_grad]:
            rule = f"has {len(others)} parameters in group {number} that are not the model's, one of shape {list(others[0])}"
            raise InvalidConfig("optimizer", path, rule, "make it of the parameters of the model that is passed")
        names = tuple(name_of[id(p)] for p in group["params"] if id(p) in name_of)
        share = sum(params[name].nbytes for name in names) / max(1, every)
        out.append(Group(names=names, values=values, share=share))
    if missing := set(params) - {name for group in out for name in group.names}:
        rule = f"leaves out {len(missing)} trained parameters, as {min(missing)}"
        raise InvalidConfig("optimizer", path, rule, "give it all, or freeze those (requires_grad=False)")
    return tuple(out)


def values_of(made: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The settings of each group of an optimizer as they are now, and what else the user has put there, as JSON values.

    Raises:
        InvalidConfig: a setting is no plain value, or a group has no learning rate.
    """
    takes, path, out = taken_by(type(made)), type(made).__name__, []
    # The class makes these itself, or they hold parameters; any other key is the user's, and the class may read it.
    makes = {"params", "param_names", *made.defaults} - takes
    for group in made.param_groups:
        values = {name: _plain(value) for name, value in group.items() if name not in makes}
        try:
            out.append(json.loads(json.dumps(values, allow_nan=False)))
        except (TypeError, ValueError) as error:
            rule = f"has settings that are no plain numbers or words ({error})"
            raise InvalidConfig("optimizer", path, rule, "say numbers, as lr=1e-3") from error
        lr = out[-1].get("lr")
        if not isinstance(lr, int | float) or lr < 0:
            raise InvalidConfig("optimizer", path, f"has the learning rate {lr}", "say a number, as lr=1e-3")
    return out


def _plain(value: Any) -> Any:
    """A setting, with a number in place of a tensor of one: torch takes a rate as a tensor, too."""
    import torch

    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value


def _small(params: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """Small parameters of as many dimensions, with values that differ from each other's; a state may have one row of a matrix."""
    import torch

    out = {}
    for name, param in params.items():
        shape = [min(size, PROBED if param.ndim == 2 else MOST) for size in param.shape]
        values = torch.arange(1.0, 1.0 + math.prod(shape), dtype=torch.float64) + len(name)
        out[name] = torch.nn.Parameter(values.reshape(shape).cos())
    return out


def _stepped(found: TorchOptimizer, params: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer as a worker makes it, after some steps along gradients that follow from the parameters.

    Raises:
        InvalidConfig: it cannot be made, or takes no step.
    """
    try:
        own = found.build_named(params.items())
        for _ in range(STEPS):
            for param in params.values():
                param.grad = param.detach().sin()
            own.step()
    except Exception as error:
        rule = f"cannot be made again by its class and settings, or takes no step: {type(error).__name__}: {error}"
        raise InvalidConfig("optimizer", found.path, rule, PLAIN) from error
    return own


def _check_new(made: torch.optim.Optimizer, new: torch.optim.Optimizer, path: str) -> None:
    """Refuse an optimizer that has more state than a new one.

    Raises:
        InvalidConfig: it has begun.
    """
    if not _counted(made) <= _counted(new):
        rule = "has taken steps before, whose state the workers' optimizers would begin without"
        raise InvalidConfig("optimizer", path, rule, "make it anew")


def _check_plain(made: torch.optim.Optimizer, own: torch.optim.Optimizer, path: str) -> None:
    """Refuse an optimizer with other plain values in itself than one that a worker makes.

    Raises:
        InvalidConfig: names the first.
    """

    def plain(one: torch.optim.Optimizer) -> dict[str, Any]:
        return {name: value for name, value in vars(one).items() if isinstance(value, bool | int | float | str)}

    if others := sorted(name for name, value in plain(made).items() if plain(own).get(name) != value):
        rule = f"has {others[0]} beyond the settings of its groups, which a worker's would not have"
        raise InvalidConfig("optimizer", path, rule, PLAIN)


def _counted(made: torch.optim.Optimizer) -> set[tuple[str, float]]:
    """The names in an optimizer's state, and its numbers in float32, among them how many steps it has taken; of tensors nothing
    more."""
    import torch

    return {
        (name, float(torch.as_tensor(value).float()) if isinstance(value, int | float) or getattr(value, "ndim", 1) == 0 else 0.0)
        for entry in made.state.values()
        for name, value in entry.items()
    }
