"""Fourth: a plan that is said to fit fits, and a plan for less memory takes less."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.gpu.places import SELDOM, Place
from tests.support.cli import Finished

SLACK = 1.1
"""The allocator rounds, and kernels take scratch memory that no reckoning knows."""


@pytest.mark.dist
@pytest.mark.parametrize("place", SELDOM, indirect=True)
def test_peaks_stay_within_what_was_reckoned_and_within_the_limit(
    place: Place, tmp_path: Path, figure: Callable[..., None]
) -> None:
    workers = 4 if place.on_card else 2
    size = ["model=mmt_small", "minibatch_size=256", "steps=6"] if place.on_card else ["model=mlp", "steps=3"]
    words = [*size, "cost=analytical", "evaluate_every=0"]

    def peaks(done: Finished) -> tuple[dict[str, float], dict[str, float]]:
        assert done.code == 0, done.out
        return done.result["predicted"]["peak_memory_bytes"], done.result["measured"]["peak_memory_bytes"]

    predicted, measured = peaks(place.run(tmp_path / "free", workers, *words))
    figure(predicted_bytes=predicted, measured_bytes=measured)
    assert all(measured[device] <= SLACK * predicted[device] for device in predicted)
    # At this limit the plan above is refused: the planner must find another, or say that there is none.
    limit = 0.9 * max(predicted.values())
    tight = place.run(tmp_path / "tight", workers, *words, f"cluster.memory_bytes={limit:.0f}")
    if tight.code == 3:
        figure(limit_bytes=limit, tight="infeasible")
        return
    predicted, measured = peaks(tight)
    figure(limit_bytes=limit, tight_predicted_bytes=predicted, tight_measured_bytes=measured)
    assert max(predicted.values()) <= limit
    assert max(measured.values()) <= SLACK * limit
