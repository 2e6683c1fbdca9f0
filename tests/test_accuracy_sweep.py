"""The instruments of `sweeps.accuracy` and `sweeps.prediction_quality`: what they say is known in cases like these."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from sweeps.accuracy import GRIDS, Result, Run, best, execute, interval
from sweeps.prediction_quality import stable_rate, worth


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    grid = replace(GRIDS["digits_deep"], words=("steps=20",))
    monkeypatch.setitem(GRIDS, "digits_deep", grid)


@pytest.mark.long
def test_a_prediction_that_leaves_nothing_is_synchronous_and_one_that_leaves_all_is_naive(short: None) -> None:
    run = Run("digits_deep", "sgd", "naive", 0.04, 0)
    naive, sync = execute(run), execute(replace(run, method="sync"))
    assert naive.accuracy != sync.accuracy
    # One stage or eight: the order of sums differs.
    assert worth(run, 0.0, noise=False) == pytest.approx(sync.accuracy, abs=1e-9)
    assert worth(run, 1.0, noise=False) == naive.accuracy


@pytest.mark.parametrize("delay", [0, 1, 4, 7])
def test_stable_rate_of_plain_descent_is_the_closed_form(delay: int) -> None:
    # The rates tried are 0.3 % apart.
    assert stable_rate(0.0, delay) == pytest.approx(2.0 * math.sin(math.pi / (2 * (2 * delay + 1))), rel=4e-3)


def test_a_rate_is_chosen_by_seeds_that_are_not_reported() -> None:
    grid = GRIDS["lstm"]
    rates = grid.rates["adamw"]
    runs = {
        Run("lstm", "adamw", "stash", rate, seed): Result(0.5 if rate == rates[1] else math.nan, 1.0, 0.0)
        for rate in rates
        for seed in grid.tuning
    }
    assert best(runs, "lstm", "adamw", "stash") == rates[1]
    reported = {Run("lstm", "adamw", "stash", rates[0], seed): Result(0.9, 1.0, 0.0) for seed in range(5)}
    assert best(runs | reported, "lstm", "adamw", "stash") == rates[1]
    runs.popitem()
    assert best(runs, "lstm", "adamw", "stash") is None


def test_a_star_stands_where_the_interval_leaves_out_zero() -> None:
    # Student's t for 4 degrees of freedom is 2.776.
    assert interval([1.0, 2.0, 3.0, 4.0, 5.0]) == "+3.0 ± 2.0 *"
    assert interval([-1.0, 2.0, -3.0, 4.0, 0.0]) == "+0.4 ± 3.4"
