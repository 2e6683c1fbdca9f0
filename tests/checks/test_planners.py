"""A small sample of `tests.checks.planners`, which runs the same on thousands of problems."""

from __future__ import annotations

import pytest

from tests.checks.planners import check


@pytest.mark.parametrize(
    ("what", "count"),
    [
        pytest.param("validate", 1, marks=pytest.mark.long),
        ("oracle", 5),
        ("dags", 1),
    ],
)
def test_sample(what, count):
    violations, summary = check(what, count)
    assert not violations, "\n".join([*violations, summary])
