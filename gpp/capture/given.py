"""What a user gives a model: tensors by flat names, with the rest of it as constants of the capture.

{"ids": tensor, "return_loss": True, "audio": Clip(wave=tensor, rate=16000)}
    tensors     ids, audio.wave
    constants   return_loss, audio.rate
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gpp.errors import InvalidConfig

_CONSTANTS = (bool, int, float, str, bytes, enum.Enum, torch.dtype, torch.device)

_Make = Callable[[Mapping[str, Tensor]], Any]


@dataclass(frozen=True, kw_only=True)
class ModelInputs:
    """A call of a model, taken apart.

    Args:
        tensors: by name; those of a container are named after it, as `audio.wave`, or `pictures.0`.
        constants: what else there is: booleans, numbers, words and None, by name.
        arguments: positional and keyword arguments of the call with other tensors of the same names.
    """

    tensors: dict[str, Tensor]
    constants: dict[str, Any]
    arguments: Callable[[Mapping[str, Tensor]], tuple[tuple[Any, ...], dict[str, Any]]]

    def call(self, model: nn.Module, flat: tuple[Tensor, ...]) -> Any:
        """What the model returns for other tensors, in the order of `tensors`."""
        positional, named = self.arguments(dict(zip(self.tensors, flat, strict=True)))
        return model(*positional, **named)


def given(model: nn.Module, inputs: Any) -> ModelInputs:
    """The inputs of a model: one tensor, several by position or by name, or a dataclass of them; they may lie in containers.

    A tensor without a name has that of the parameter that takes it, or its position.

    Raises:
        InvalidConfig: there are more than the model takes; one is neither a tensor, nor a constant, nor a container of them.
    """
    parameters = inspect.signature(model.forward).parameters
    named = _by_name(inputs, set(parameters))
    if named is None:
        values = tuple(inputs) if isinstance(inputs, list | tuple) and not _is_object(inputs) else (inputs,)
        known = [name for name, p in parameters.items() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        several = any(p.kind is p.VAR_POSITIONAL for p in parameters.values())
        if len(values) > len(known) and not several:
            fix = "give them by name; targets of the same batch come after the inputs, as in parallelize(model, inputs, targets)"
            raise InvalidConfig("inputs", len(values), f"{type(model).__name__}.forward takes {len(known)}", fix)
        named, by_position = {(known[i] if i < len(known) else str(i)): value for i, value in enumerate(values)}, True
    else:
        by_position = False
        _check_names(model, named, parameters)
    tensors: dict[str, Tensor] = {}
    constants: dict[str, Any] = {}
    makers = {str(name): _taken(value, str(name), tensors, constants) for name, value in named.items()}

    def arguments(flat: Mapping[str, Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        made = {name: make(flat) for name, make in makers.items()}
        return (tuple(made.values()), {}) if by_position else ((), made)

    return ModelInputs(tensors=tensors, constants=constants, arguments=arguments)


def _check_names(model: nn.Module, named: Mapping[str, Any], parameters: Mapping[str, inspect.Parameter]) -> None:
    """Refuse names that the model does not take.

    Raises:
        InvalidConfig: names the first, and what it takes.
    """
    kinds = {p.kind for p in parameters.values()}
    if inspect.Parameter.VAR_KEYWORD in kinds or type(model).__call__ is not nn.Module.__call__:
        return
    for name in named:
        if name not in parameters:
            rule = f"is none that {type(model).__name__}.forward takes; it takes {', '.join(parameters)}"
            raise InvalidConfig(f"inputs.{name}", name, rule, "give the inputs by these names, or by position")


def _is_object(value: Any) -> bool:
    """Whether a value is a dataclass that is no mapping, as those of Transformers are."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type | Mapping)


def _by_name(inputs: Any, parameters: set[str]) -> dict[str, Any] | None:
    """Inputs that have names of their own; None for those by position."""
    if isinstance(inputs, Mapping):
        return dict(inputs)
    if hasattr(inputs, "_asdict"):
        return inputs._asdict()
    if _is_object(inputs):
        fields = {field.name: getattr(inputs, field.name) for field in dataclasses.fields(inputs)}
        return fields if set(fields) <= parameters else None
    if hasattr(inputs, "keys"):  # the batches of Hugging Face are mappings in all but name
        return {name: inputs[name] for name in inputs.keys()}  # noqa: SIM118
    return None


def _taken(value: Any, name: str, tensors: dict[str, Tensor], constants: dict[str, Any]) -> _Make:
    """Take a value apart; what makes it again of other tensors."""
    if isinstance(value, Tensor):
        tensors[name] = value
        return lambda flat: flat[name]
    if value is None or isinstance(value, _CONSTANTS):
        constants[name] = value
        return lambda flat: value

    def parts(items: Mapping[Any, Any]) -> dict[Any, _Make]:
        return {key: _taken(item, f"{name}.{key}", tensors, constants) for key, item in items.items()}

    if isinstance(value, Mapping):
        inner, kind = parts(value), type(value) if dataclasses.is_dataclass(value) else dict
        return lambda flat: kind(**{key: make(flat) for key, make in inner.items()}) if kind is not dict else _all(inner, flat)
    if _is_object(value):
        inner = parts({field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init})
        return lambda flat: dataclasses.replace(value, **_all(inner, flat))
    if isinstance(value, list | tuple):
        kind, fields = type(value), getattr(value, "_fields", range(len(value)))
        inner = parts(dict(zip(fields, value, strict=True)))
        if hasattr(value, "_fields"):
            return lambda flat: kind(*_all(inner, flat).values())
        return lambda flat: kind(_all(inner, flat).values())
    rule = f"{name!r} must be a tensor, batch first, a boolean, a number, a word or None, or a container of them"
    raise InvalidConfig("inputs", type(value).__name__, rule, "convert it, as in torch.as_tensor(...), or leave it out")


def _all(inner: Mapping[Any, _Make], flat: Mapping[str, Tensor]) -> dict[Any, Any]:
    return {key: make(flat) for key, make in inner.items()}
