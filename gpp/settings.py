"""Settings that refuse wrong values: types and ranges stand on the fields, and one function writes the message.

A class of settings declares its fields with these types and with pydantic's `Field`:

    @settings("strategy.planner")
    class Planner(AbstractPlanner):
        patience: Count = 6
        states: Literal["auto", "linear"] = "auto"
        rate: Annotated[float, Field(gt=0, examples=[0.01])]

Values are not converted: `True` is no number, `"3"` and `3.0` are no integers, NaN and infinities are no numbers. An
integer may stand for a number, and a list for a tuple. Objects are passed on as they are, without a copy.
`__post_init__` holds the rules between fields; it runs on fields that are right by themselves.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from functools import cache, wraps
from typing import Annotated, Any, ParamSpec, TypeVar, dataclass_transform, get_type_hints

from pydantic import Field
from pydantic_core import SchemaValidator, ValidationError, core_schema

from gpp.errors import InvalidConfig, written
from gpp.setting_types import MOST, kind_of

C = TypeVar("C", bound=type)
P = ParamSpec("P")
R = TypeVar("R")

Count = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]
Seed = Annotated[int, Field(ge=0, le=2**32 - 1)]
"""The seeds that numpy and torch both take."""
LEAST, LARGEST = 1e-36, 1e36
"""The ends of what an amount may be, other than 0: beyond are typing errors, whose products are no numbers any more."""
Positive = Annotated[float, Field(gt=0, ge=LEAST, le=LARGEST)]
NotNegative = Annotated[float, Field(ge=0, le=LARGEST)]
Seconds = Annotated[float, Field(gt=0, le=MOST)]
"""A time to wait for something; clocks cannot take thirty years and more."""
Share = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
"""The weight of the past in a running mean."""
Text = Annotated[str, Field(min_length=0)]
"""Words that may be empty; a plain `str` may not."""


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(field,))
def settings(prefix: str, *, slots: bool = True) -> Callable[[C], C]:
    """Make a class a frozen, keyword-only dataclass whose fields are checked whenever one is made.

    Args:
        prefix: the dotted name of the object on the command line, as in `strategy.planner`; empty for the root.
        slots: False where the class keeps computed values beside its fields.

    Raises:
        InvalidConfig: (on construction) a value breaks its field's type or range; names field, value, rule and fix.
    """

    def decorate(cls: C) -> C:
        own = cls.__dict__.get("__post_init__")

        def __post_init__(self: Any) -> None:
            _check(self)
            if own is not None:
                own(self)

        cls.__post_init__ = __post_init__
        made = dataclass(frozen=True, kw_only=True, slots=slots)(cls)
        _PREFIX[made] = prefix
        return made

    return decorate


def file_word(part: object) -> str:
    """The name of the file of a part's class: the word that chooses it, as conf entry, file and class have one name."""
    return type(part).__module__.rpartition(".")[2]


def arguments(prefix: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Check the arguments of a function as `settings` does the fields of a class.

    Args:
        prefix: as in `settings`.

    Raises:
        InvalidConfig: (on a call) as for `settings`.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)

        @cache
        def allowed() -> Fields:
            hints = get_type_hints(function, include_extras=True)
            given = {name: parameter.default for name, parameter in signature.parameters.items()}
            defaults = {name: value for name, value in given.items() if value is not inspect.Parameter.empty}
            return Fields(prefix, {name: hints[name] for name in given if name in hints}, defaults)  # `self` has none

        @wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            bound.arguments.update(allowed().checked(dict(bound.arguments)))
            return function(*bound.args, **bound.kwargs)

        return checked

    return decorate


_PREFIX: dict[type, str] = {}
"""Class of settings -> its dotted name."""


class Fields:
    """The declared fields of a class or a function, and the validator made of them."""

    def __init__(self, prefix: str, hints: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self._prefix, self._defaults = prefix, defaults
        self.kinds = {name: kind_of(hint) for name, hint in hints.items()}
        schema = {name: core_schema.typed_dict_field(kind.schema) for name, kind in self.kinds.items()}
        self._validator = SchemaValidator(core_schema.typed_dict_schema(schema))

    def checked(self, values: dict[str, Any]) -> dict[str, Any]:
        """The values as the fields hold them.

        Raises:
            InvalidConfig: names the first field that is wrong.
        """
        try:
            return self._validator.validate_python(values)
        except ValidationError as error:
            found = error.errors(include_url=False, include_context=False, include_input=False)[0]
        raise self._refusal(values, found["loc"])

    def _refusal(self, values: dict[str, Any], place: tuple[int | str, ...]) -> InvalidConfig:
        """The error at a place of the values: a field, then keys of mappings and positions in lists."""
        name, *inner = place[:-2] if place[-1] == "[key]" else place
        dotted = f"{self._prefix}.{name}" if self._prefix else str(name)
        kind, value, default = self.kinds[str(name)], values[str(name)], self._defaults.get(str(name), MISSING)
        whole = [(dotted, kind, value)]  # the innermost one that a user can name by itself comes last
        for key in inner:
            part = kind.part(key)
            try:
                value = value[key]
            except (LookupError, TypeError):
                break
            if part is None:
                break
            kind, dotted = part, f"{dotted}[{key}]" if isinstance(key, int) else f"{dotted}.{key}"
            if not isinstance(key, int) or isinstance(value, Mapping):
                whole.append((dotted, kind, value))
        named, kind, value = whole[-1]
        candidates = [*kind.near(value), *([default] if len(whole) == 1 and default is not MISSING else ()), *kind.examples]
        meant = next((candidate for candidate in candidates if kind.allows(candidate)), MISSING)
        rule = kind.rule(value)
        fix = f"set {named}={written(meant)}"
        if is_dataclass(meant) or (isinstance(meant, Mapping) and any(map(is_dataclass, meant.values()))):
            fix = f"leave {named} out"
        elif meant is MISSING:
            fix = kind.remedy(value) or f"give {rule}"
        return InvalidConfig(named, value, f"must be {rule}", fix)


@cache
def declared(cls: type) -> Fields:
    """The fields of a class of settings."""
    prefix = next(_PREFIX[base] for base in cls.__mro__ if base in _PREFIX)
    mine = [f for f in fields(cls) if f.init]
    defaults = {f.name: f.default for f in mine if f.default is not MISSING}
    defaults |= {f.name: f.default_factory() for f in mine if f.default_factory is not MISSING}
    # A hint is read in the module that declares the field; `get_type_hints` would read those of all bases too.
    home = {name: base.__module__ for base in reversed(cls.__mro__) for name in inspect.get_annotations(base)}
    return Fields(prefix, {f.name: _hint(f.type, home[f.name]) if isinstance(f.type, str) else f.type for f in mine}, defaults)


@cache
def _hint(text: str, module: str) -> Any:
    """The type that a text in a module names."""
    return eval(text, vars(sys.modules[module]))


def _check(self: Any) -> None:
    allowed = declared(type(self))
    given = {name: getattr(self, name) for name in allowed.kinds}
    for name, value in allowed.checked(given).items():
        if value is not given[name]:
            object.__setattr__(self, name, value)
