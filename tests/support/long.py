"""Tests marked `long` say little more than others: `make check` runs them, `make test` does not."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def thinned(cases: Iterable[Any], keep: int = 2) -> list[Any]:
    """Of cases of one property, drawn or listed: the first of every `keep`; the others are long tests."""
    return [
        case if i % keep == 0 else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.long)
        for i, case in enumerate(cases)
    ]


def selected(request: pytest.FixtureRequest, name: str) -> list[Any]:
    """The values of a parameter in those tests of the asking fixture's module that run in this session, each once."""
    items = [item for item in request.session.items if isinstance(item, pytest.Function) and item.module is request.module]
    values = [item.callspec.params[name] for item in items if hasattr(item, "callspec") and name in item.callspec.params]
    return [value for i, value in enumerate(values) if value not in values[:i]]
