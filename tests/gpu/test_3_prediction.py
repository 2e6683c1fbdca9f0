"""Third: how far the predicted step is from the measured one."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.gpu.places import SELDOM, Place

MOST = 0.5
"""Largest error of a step on a card for each worker: the analytical model's own aim is far below."""


@pytest.mark.dist
@pytest.mark.parametrize("place", SELDOM, indirect=True)
@pytest.mark.parametrize("strategy", ["graphpipe", "sequential"])
def test_the_error_of_the_prediction(place: Place, strategy: str, tmp_path: Path, figure: Callable[..., None]) -> None:
    if not place.on_card and strategy != "sequential":
        pytest.skip("one strategy is enough for the dry run")
    size = ["model=mmt_small", "steps=60", "minibatch_size=256"] if place.on_card else ["model=mlp", "steps=4", "cost.budget_s=0.3"]
    workers = 4 if place.on_card else 2
    done = place.run(tmp_path / "run", workers, *size, f"strategy={strategy}", "evaluate_every=0", "cost=profiled")
    assert done.code == 0, done.out
    result = done.result
    error = result["prediction_error"]
    figure(
        strategy=strategy,
        workers_per_card=place.shared(workers),
        predicted_s=result["predicted"]["iteration_s"],
        measured_s=result["measured"]["iteration_s"],
        prediction_error=error,
        bubble_fraction=result["measured"]["bubble_fraction"],
    )
    assert math.isfinite(error)
    if place.on_card and place.shared(workers) == 1:
        assert abs(error) < MOST
