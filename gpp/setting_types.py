"""The values that the type of a setting allows, as a validator and in words (`gpp.settings`)."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints, is_typeddict

from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, SchemaValidator, ValidationError, core_schema

from gpp.errors import written

MOST = 10**9
"""The upper end of a range without one of its own: a larger integer is a typing error, and a loop over it a hang."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingKind:
    """The values that a declared type allows, and their description.

    Args:
        schema: schema of the validator.
        rule: a wrong value -> the description of a right one, as in `an integer of at least 1`.
        many: the description of several values, as in `integers of at least 1`.
        near: a wrong value -> values that may have been meant, the nearest first; not all of them are allowed.
        examples: allowed values.
        remedy: a wrong value -> what mends it, where that is no value; empty where nothing better is known.
        part: key or position -> the kind of the value there; None where it has no name of its own.
    """

    schema: CoreSchema
    rule: Callable[[object], str]
    many: str = "values"
    near: Callable[[object], Iterable[object]] = lambda value: ()
    examples: tuple[object, ...] = ()
    remedy: Callable[[object], str] = lambda value: ""
    part: Callable[[int | str], SettingKind | None] = lambda key: None

    def allows(self, value: object) -> bool:
        try:
            SchemaValidator(self.schema).validate_python(value)
        except ValidationError:
            return False
        return True


def kind_of(hint: Any, limits: Mapping[str, Any] | None = None) -> SettingKind:
    """The kind of values that a type hint allows.

    Args:
        limits: limits that `Field` adds to the hint: `ge`, `gt`, `le`, `lt`, `min_length`, `max_length`, `examples`.

    Raises:
        TypeError: settings do not know the hint.
    """
    limits = limits or {}
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return kind_of(args[0], {**limits, **_limits(args[1:])})
    if hint in _PLAIN:
        return _PLAIN[hint](limits)
    if origin is Literal:
        return _choice(args)
    if origin in (Union, UnionType):
        return _union([arg for arg in args if arg is not NoneType], NoneType in args, limits)
    if origin in (tuple, list, Sequence):
        return _items(
            args[:1] if len(args) < 2 or args[1] is Ellipsis else args, limits, fixed=len(args) > 1 and args[1] is not Ellipsis
        )
    if origin in (dict, Mapping) or hint in (dict, Mapping):
        keys, values = args or (Any, Any)
        return _mapping(kind_of(keys), kind_of(values), limits)
    if is_typeddict(hint):
        return _record(
            {key: kind_of(part) for key, part in get_type_hints(hint, include_extras=True).items()}, hint.__required_keys__
        )
    if origin is Callable:
        return SettingKind(schema=core_schema.callable_schema(), rule=lambda value: "a function", many="functions")
    if isinstance(origin or hint, type):
        return _instance(origin or hint)
    raise TypeError(f"settings cannot have the type {hint}")


def _limits(extra: Iterable[Any]) -> dict[str, Any]:
    """The bounds that `Field` declares."""
    out: dict[str, Any] = {}
    for info in extra:
        if isinstance(info, FieldInfo):
            for bound in info.metadata:
                out |= {name: getattr(bound, name) for name in bound.__slots__}
            out |= {"examples": tuple(info.examples)} if info.examples else {}
    return out


def _integer(limits: Mapping[str, Any]) -> SettingKind:
    bounds: dict[str, Any] = {"le": MOST} | _bounds(limits)
    if "gt" not in bounds:
        bounds = {"ge": -MOST} | bounds
    least = bounds.get("ge", bounds.get("gt", 0) + 1)
    return SettingKind(
        schema=core_schema.int_schema(strict=True, **bounds),
        rule=lambda value: _ranged("an integer", value, bounds),
        many=_ranged("integers", None, bounds),
        near=partial(_near_number, whole=True, bounds=bounds),
        examples=(*limits.get("examples", ()), max(1, least), least),
    )


def _number(limits: Mapping[str, Any]) -> SettingKind:
    bounds = _bounds(limits)
    inside = [value for value in (1.0, 0.5, 0.0) if value not in (bounds.get("gt"), bounds.get("lt"))]
    return SettingKind(
        schema=core_schema.float_schema(strict=True, allow_inf_nan=False, **bounds),
        rule=lambda value: _ranged("a finite number" if _endless(value) else "a number", value, bounds),
        many=_ranged("numbers", None, bounds),
        near=partial(_near_number, whole=False, bounds=bounds),
        examples=(*limits.get("examples", ()), *inside, *(bounds[name] for name in ("ge", "le") if name in bounds)),
    )


def _endless(value: object) -> bool:
    """Whether a number has no end: not a number, an infinity, or an integer too large for a float."""
    try:
        return isinstance(value, int | float) and not math.isfinite(value)
    except OverflowError:
        return True


def _bounds(limits: Mapping[str, Any]) -> dict[str, Any]:
    return {name: limits[name] for name in ("ge", "gt", "le", "lt") if name in limits}


def _ranged(noun: str, value: object, bounds: Mapping[str, Any]) -> str:
    """A noun with its range; an end that only guards against typing errors is named if the value is beyond it."""

    def beyond(bound: Any) -> bool:
        if not isinstance(value, int | float) or isinstance(value, bool):
            return False
        return 0 < value < bound if _tiny(bound) else value > bound if bound > 0 else value < bound

    named = {name: bound for name, bound in bounds.items() if not _guards(bound) or beyond(bound)}
    if "ge" in named:
        named.pop("gt", None)
    if named.keys() == {"gt"} and named["gt"] == 0 and " " in noun:
        return re.sub(r"^an? ", "a positive ", noun)
    if named.keys() == {"ge", "le"}:
        return f"{noun} from {named['ge']} to {named['le']}"
    words = {"ge": "of at least", "gt": "above", "le": "of at most", "lt": "below"}
    ends = [f"{words[name]} {named[name]}" for name in ("ge", "gt", "le", "lt") if name in named]
    return f"{noun} {' and '.join(ends).replace('and of at', 'and at')}" if ends else noun


def _tiny(bound: Any) -> bool:
    return 0 < bound <= 1 / MOST


def _guards(bound: Any) -> bool:
    """Whether an end of a range only guards against typing errors."""
    return not -MOST < bound < MOST or _tiny(bound)


def _near_number(value: object, *, whole: bool, bounds: Mapping[str, Any]) -> Iterable[object]:
    """Numbers that a wrong value may have meant: without quotes or fraction, then the nearest end of the range."""
    try:
        number: Any = float(value) if isinstance(value, str) else value
        if isinstance(number, bool) or not isinstance(number, int | float) or _endless(number):
            return
        number = round(number) if whole or (isinstance(value, str) and number == round(number) and abs(number) < MOST) else number
    except (ValueError, OverflowError):
        return
    yield number
    for name, nearest in (("ge", max), ("le", min)):
        if name in bounds and not _guards(bounds[name]):
            number = nearest(number, bounds[name])
    yield number


def _truth(limits: Mapping[str, Any]) -> SettingKind:
    meant = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}

    def near(value: object) -> Iterable[object]:
        word = written(value).strip("'\"").lower()
        return [meant[word]] if word in meant else []

    return SettingKind(
        schema=core_schema.bool_schema(strict=True),
        rule=lambda value: "true or false",
        many="truth values",
        near=near,
        examples=(False,),
    )


def _word(limits: Mapping[str, Any]) -> SettingKind:
    least, most = limits.get("min_length", 1), limits.get("max_length", 4096)

    def rule(value: object) -> str:
        if isinstance(value, str) and len(value) > most:
            return f"a text of at most {most} characters"
        return "a text that is not empty" if value == "" else "a text"

    def near(value: object) -> Iterable[object]:
        return [written(value)] if isinstance(value, bool | float) or (isinstance(value, int) and not _endless(value)) else []

    return SettingKind(
        schema=core_schema.str_schema(strict=True, min_length=least, max_length=most),
        rule=rule,
        many="texts",
        near=near,
        examples=limits.get("examples", ()),
    )


_PLAIN: dict[Any, Callable[[Mapping[str, Any]], SettingKind]] = {
    int: _integer,
    float: _number,
    bool: _truth,
    str: _word,
    Any: lambda limits: SettingKind(schema=core_schema.any_schema(), rule=lambda value: "anything"),
    object: lambda limits: SettingKind(schema=core_schema.any_schema(), rule=lambda value: "anything"),
}


def _choice(choices: tuple[Any, ...]) -> SettingKind:
    """One of a few words or numbers."""

    words = [written(choice) for choice in choices]

    def rule(value: object) -> str:
        return f"one of {', '.join(words)}" if len(words) > 2 else " or ".join(words)

    def near(value: object) -> Iterable[object]:
        word, lowered = written(value).strip("'\"").lower(), [written(choice).lower() for choice in choices]
        return [choices[lowered.index(match)] for match in get_close_matches(word, lowered, n=1, cutoff=0.5)]

    schema = core_schema.literal_schema(list(choices))
    if any(isinstance(choice, bool | int) for choice in choices):
        # To Python 1 is true and 0 is false; to a user they are not.
        schema = core_schema.no_info_plain_validator_function(partial(_exact, choices))
    return SettingKind(schema=schema, rule=rule, many=f"the words {', '.join(words)}", near=near, examples=choices[:1])


def _exact(choices: tuple[Any, ...], value: object) -> object:
    """The value, if it is one of the choices and has the type of that choice."""
    if not any(type(choice) is type(value) and choice == value for choice in choices):
        raise ValueError("none of the choices")
    return value


def _union(hints: list[Any], optional: bool, limits: Mapping[str, Any]) -> SettingKind:
    kinds = [kind_of(hint, limits) for hint in hints]
    first = kinds[0]
    schemas: list[CoreSchema | tuple[CoreSchema, str]] = [kind.schema for kind in kinds]
    schema = first.schema if len(kinds) == 1 else core_schema.union_schema(schemas, mode="left_to_right")

    def rule(value: object) -> str:
        words = " or ".join(kind.rule(value) for kind in kinds)
        return f"{words}, or null" if optional else words

    return SettingKind(
        schema=core_schema.nullable_schema(schema) if optional else schema,
        rule=rule,
        many=" or ".join(kind.many for kind in kinds),
        near=lambda value: [near for kind in kinds for near in kind.near(value)],
        examples=tuple(example for kind in kinds for example in kind.examples),
        part=first.part if len(kinds) == 1 else lambda key: None,
    )


def _items(hints: Sequence[Any], limits: Mapping[str, Any], *, fixed: bool) -> SettingKind:
    """A list, held as a tuple: of any length, or with a type for each position."""
    kinds = [kind_of(hint) for hint in hints]
    schemas = [kind.schema for kind in kinds]
    lengths: Any = {name: limits[name] for name in ("min_length", "max_length") if name in limits and not fixed}
    inner = core_schema.tuple_schema(schemas, variadic_item_index=None if fixed else 0, strict=True, **lengths)
    least, numbers = lengths.get("min_length", 0), {2: "two", 3: "three", 4: "four"}
    rule = f"a list of {f'{len(kinds)} ' if fixed else ''}{kinds[0].many}".replace("  ", " ")
    if fixed and len(kinds) in numbers:
        rule = f"{numbers[len(kinds)]} {kinds[0].many}" if len(set(hints)) == 1 else f"a list of {numbers[len(kinds)]} values"
    elif least:
        rule = f"{rule} with at least {least} item"

    def near(value: object) -> Iterable[object]:
        if isinstance(value, list | tuple):
            mended = []
            for kind, item in zip(kinds if fixed else kinds * len(value), value, strict=False):
                mended.append(next((c for c in [item, *kind.near(item), *kind.examples] if kind.allows(c)), item))
            yield mended
        yield [value]

    return SettingKind(
        schema=core_schema.no_info_before_validator_function(_as_tuple, inner),
        rule=lambda value: rule,
        many="lists",
        near=near,
        examples=(*limits.get("examples", ()), [kind.examples[0] for kind in kinds if kind.examples]),
        part=lambda key: (kinds[key] if fixed else kinds[0]) if isinstance(key, int) else None,
    )


def _as_tuple(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


def _mapping(keys: SettingKind, values: SettingKind, limits: Mapping[str, Any]) -> SettingKind:
    least = limits.get("min_length", 0)
    inner = core_schema.dict_schema(keys.schema, values.schema, strict=True, min_length=least)
    rule = f"a mapping from {keys.many} to {values.many}{f' with at least {least} entry' if least else ''}"
    return SettingKind(
        schema=core_schema.no_info_before_validator_function(_as_dict, inner),
        rule=lambda value: rule,
        many="mappings",
        part=lambda key: values,
    )


def _as_dict(value: object) -> object:
    return dict(value) if isinstance(value, Mapping) and not isinstance(value, dict) else value


def _record(parts: Mapping[str, SettingKind], required: Iterable[str]) -> SettingKind:
    """A mapping with these keys, and no others."""
    schema = {key: core_schema.typed_dict_field(part.schema, required=key in required) for key, part in parts.items()}
    words = f"with {' and '.join(parts)}" if required else f"with no other keys than {' and '.join(parts)}"

    def near(value: object) -> Iterable[object]:
        if isinstance(value, Mapping):
            yield {key: item for key, item in value.items() if key in parts}

    return SettingKind(
        schema=core_schema.typed_dict_schema(schema, strict=True, extra_behavior="forbid"),
        rule=lambda value: f"a mapping {words}",
        many=f"mappings {words}",
        near=near,
        part=lambda key: parts.get(str(key)),
    )


def _instance(cls: type) -> SettingKind:
    """An object of a class, which is passed on as it is."""
    path = f"{cls.__module__}.{cls.__qualname__}"

    def remedy(value: object) -> str:
        return f"write _target_: {path} beside its other settings" if isinstance(value, Mapping) else ""

    rule, many = f"an object of the class {path}", f"objects of the class {path}"
    return SettingKind(schema=core_schema.is_instance_schema(cls), rule=lambda value: rule, many=many, remedy=remedy)
