"""What is measured of a stream of requests."""

from types import SimpleNamespace

import pytest

from gpp.mechanisms.serving.course import Requests
from gpp.mechanisms.serving.results import timeline


def test_a_slow_request_does_not_hide_that_devices_wait() -> None:
    """Requests of 10 s, computed in 4 s each; one, while another program runs, takes 1,000 s of both."""
    plan = SimpleNamespace(minibatch_size=8, stages=[SimpleNamespace(unit=8)])
    job = SimpleNamespace(settings=SimpleNamespace(course=Requests(buffers=2)), plan=plan)
    starts, ends, steps, now = {}, {}, [], 0.0
    for n in range(9):
        busy, whole = (1000.0, 1000.0) if n == 6 else (4.0, 10.0)
        starts[n], ends[n] = now, now + whole
        steps.append({"events": [(0, "F", 0, n, now, now + busy)]})
        now += whole
    found = timeline(job, [{"device": 0, "peak_memory_bytes": 1, "steps": steps}], starts, ends)  # type: ignore[arg-type]
    assert found.metrics.iteration_s == 10.0 and found.metrics.bubble_fraction == pytest.approx(0.6)
