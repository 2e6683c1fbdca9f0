"""What a narrower type of forwards makes of a planning problem."""

from dataclasses import replace

import pytest

from gpp.cost.models.analytical import Analytical
from gpp.mechanisms.precision.asked import ASKED
from tests.support.problems import random_problem


def test_products_run_at_the_rate_of_the_narrow_type() -> None:
    """16 times the FLOP/s: passes that products bound take a sixteenth; the graph stays as it is."""
    problem = replace(random_problem(3, max_ops=6, max_devices=2), cost=Analytical())
    device = replace(
        problem.cluster.devices[0],
        peak_flop_per_s={"float32": 1e9, "bfloat16": 16e9},
        memory_bandwidth_bytes_per_s=1e15,
        kernel_latency_s=0.0,
    )
    problem = replace(problem, cluster=replace(problem.cluster, devices=(device,) * problem.cluster.num_devices))
    posed = ASKED.posed(problem, {"autocast": "bfloat16"})
    before, after = problem.op_times(2, 0), posed.op_times(2, 0)
    assert before.forward_s.sum() > 0
    assert after.forward_s == pytest.approx(before.forward_s / 16) and after.backward_s == pytest.approx(before.backward_s / 16)
    assert posed.graph == problem.graph and posed.cost.product_type(posed.graph) == "bfloat16"
