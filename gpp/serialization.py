"""The file form of every value: JSON that reads back equal.

Values are frozen standard-library dataclasses; pydantic reads and writes them with their declared
types, so a malformed file is refused with the path of the offending field.
"""

from __future__ import annotations

from functools import cache
from typing import Any, TypeVar

from pydantic import TypeAdapter

T = TypeVar("T")


@cache
def _adapter(cls: Any) -> TypeAdapter[Any]:
    return TypeAdapter(cls)


def to_json(value: object) -> str:
    """JSON text of a value; `from_json(type(value), to_json(value)) == value`."""
    return _adapter(type(value)).dump_json(value, indent=1).decode()


def from_json(cls: type[T], text: str | bytes) -> T:
    """The value of class `cls` that `text` describes.

    Raises:
        pydantic.ValidationError: the text does not describe a `cls`; names the field.
    """
    return _adapter(cls).validate_json(text)
