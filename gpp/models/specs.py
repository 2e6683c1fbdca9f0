"""Inputs and targets that the settings of a model declare."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpp.errors import InvalidConfig
from gpp.models.base import TensorSpec
from gpp.models.dotted import nearest
from gpp.setting_types import kind_of
from gpp.settings import Count, Natural

KEYS = ("shape", "dtype", "high", "count", "optional")
SIZE, SIZE_OR_NONE = kind_of(Count), kind_of(Natural)


def read_specs(field: str, specs: Mapping[str, Any], sizes: Mapping[str, Any], *, group: str) -> dict[str, TensorSpec]:
    """The tensors that `model.input_specs` or `model.target_specs` declares, by name.

    A whole number declares a vector of floats of that width. A mapping declares `shape`, `dtype` and `high`, the fields
    of `TensorSpec`. `count: N` stands for N equal tensors, called NAME_0 to NAME_{N-1}; `optional: true` leaves a
    tensor out where one of its sizes is 0. Sizes, counts and `high` are numbers, or names of the model's settings.

    Args:
        field: name of the setting that is read, as the user writes it.
        specs: declarations by name.
        sizes: the model's settings by name.
        group: prefix of the settings' names for the user, as in `model`.

    Raises:
        InvalidConfig: no tensor is declared, or a declaration means no tensor.
    """
    if not specs:
        fix = "x: {shape: [16], dtype: float}"
        if field.endswith("target_specs"):
            fix = "declare one that the loss ignores, as matched: {dtype: bool}, and let the data give it"
        raise InvalidConfig(field, specs, "must name at least one tensor", fix)
    found: dict[str, TensorSpec] = {}
    for name, given in specs.items():
        found |= _read(f"{field}.{name}", name, given, sizes, group)
    return found


def _read(field: str, name: str, given: Any, sizes: Mapping[str, Any], group: str) -> dict[str, TensorSpec]:
    spec: Any = {"shape": [given]} if isinstance(given, int) else given
    if not isinstance(spec, Mapping) or set(spec) - set(KEYS):
        wrong = sorted(set(spec) - set(KEYS)) if isinstance(spec, Mapping) else []
        fix = nearest(str(wrong[0]), KEYS) if wrong else "x: {shape: [16], dtype: float}"
        raise InvalidConfig(field, given, f"takes {', '.join(KEYS)}", fix)

    def size(value: Any) -> int:
        own, number, kind = field, value, SIZE_OR_NONE if spec.get("optional") else SIZE
        if isinstance(value, str):
            if value not in sizes:
                raise InvalidConfig(field, given, f"{value} is neither a number nor a setting of the model", nearest(value, sizes))
            own, number = f"{group}.{value}", sizes[value]
        if not kind.allows(number):
            raise InvalidConfig(own, number, f"must be {kind.rule(number)}", f"set {own}={kind.examples[0]}")
        return number

    extents = spec.get("shape") or ()
    if not isinstance(extents, list | tuple):
        raise InvalidConfig(field, given, "its shape must be a list of sizes", f"{name}: {{shape: [16], dtype: float}}")
    shape = tuple(size(value) for value in extents)
    if 0 in shape:
        return {}
    try:
        high = None if spec.get("high") is None else size(spec["high"])
        made = TensorSpec(shape=shape, dtype=spec.get("dtype", "float"), high=high)
    except InvalidConfig as error:
        own = error.field.startswith(group)
        raise error if own else InvalidConfig(f"{field}.{error.field}", error.value, error.rule, error.fix) from None
    return {name: made} if "count" not in spec else {f"{name}_{i}": made for i in range(size(spec["count"]))}


def named_sizes(specs: Mapping[str, Any]) -> set[str]:
    """The settings that declarations name as a size."""
    return {
        word
        for spec in specs.values()
        if isinstance(spec, Mapping)
        for word in (*(spec.get("shape") or ()), spec.get("high"), spec.get("count"))
        if isinstance(word, str)
    }


def by_loss(*, loss: str, **specs: Any) -> Any:
    """The target specs of a model whose targets depend on its loss.

    Args:
        loss: the model's loss.
        specs: target specs by loss.

    Raises:
        InvalidConfig: the model has no targets for this loss.
    """
    if loss not in specs:
        raise InvalidConfig("model.loss", loss, f"must be one of {', '.join(specs)}", nearest(str(loss), specs))
    return specs[loss]
