"""Ranges and rules that the arguments of several networks share."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from gpp.errors import InvalidConfig

Rate = Annotated[float, Field(ge=0, lt=1)]
"""The share of values that dropout sets to zero."""


def divides(**sizes: int) -> None:
    """Refuse a first argument that does not divide the second one, as in `divides(num_heads=num_heads, hidden=hidden)`.

    Raises:
        InvalidConfig: names both.
    """
    (part, divisor), (whole, size) = sizes.items()
    if size % divisor:
        largest = next(d for d in range(min(divisor, size), 0, -1) if size % d == 0)
        raise InvalidConfig(f"model.{part}", divisor, f"must divide model.{whole}={size}", f"set model.{part}={largest}")
