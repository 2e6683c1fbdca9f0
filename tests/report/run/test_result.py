"""The file of a run's result, and the peak of memory in it."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from gpp.report.run.record import Asked, RunRecord
from gpp.report.run.result import finite, peak_memory_bytes, reset_peak_memory, write_json
from gpp.timeline import Metrics

KEYS = [
    "status",
    "reason",
    "model",
    "strategy",
    "cluster",
    "engine",
    "seed",
    "plan",
    "predicted",
    "measured",
    "prediction_error",
    "loss",
    "final_metric",
    "planning_peak_bytes",
]
PLAN_KEYS = [
    "num_stages",
    "depth",
    "num_devices",
    "minibatch_size",
    "microbatch_sizes",
    "search_s",
    "num_ops",
    "lower_bound_s",
    "optimality_gap",
]
METRICS = [
    "iteration_s",
    "throughput_samples_per_s",
    "bubble_fraction",
    "peak_memory_bytes",
    "communication_bytes",
    "max_in_flight_samples",
    "weight_versions",
    "staleness",
    "overhead_s",
    "serving",
    "spread",
]


def test_contract(run4: RunRecord) -> None:
    assert list(run4.result) == KEYS and list(run4.result["plan"]) == PLAN_KEYS
    assert list(run4.result["predicted"]) == list(run4.result["measured"]) == METRICS == [f.name for f in fields(Metrics)]
    assert run4.plan is not None
    assert run4.result["plan"]["microbatch_sizes"] == {str(s): 4 for s in range(len(run4.plan.stages))}
    assert run4.result["plan"]["num_ops"] == sum(len(stage.ops) for stage in run4.plan.stages)
    assert json.loads(json.dumps(run4.result, allow_nan=False)) == run4.result


def test_without_a_plan() -> None:
    asked = Asked(model="m", strategy="s", cluster="c", engine="e", seed=1)
    result = RunRecord(asked=asked, status="infeasible", reason="too big").result
    assert list(result) == KEYS and result["plan"] is result["predicted"] is result["measured"] is None
    assert result["loss"] == [] and result["final_metric"] == {}


def test_numbers_become_finite() -> None:
    assert finite({1: float("nan"), "a": [float("inf"), np.float32(0.5), np.int64(3)], "b": (True, None, Path("x"))}) == {
        "1": None,
        "a": [None, 0.5, 3],
        "b": [True, None, "x"],
    }


def test_writing_is_atomic(tmp_path: Path) -> None:
    path = tmp_path / "new" / "result.json"
    write_json(path, {"a": float("nan")})
    assert json.loads(path.read_text()) == {"a": None}
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": None}
    assert [p.name for p in path.parent.iterdir()] == ["result.json"]


def test_the_peak_is_seen_and_forgotten() -> None:
    reset_peak_memory()
    before = peak_memory_bytes()
    block = bytearray(200_000_000)
    block[::4096] = b"x" * len(block[::4096])
    peak = peak_memory_bytes()
    assert peak > before + 150_000_000
    del block
    reset_peak_memory()
    assert peak_memory_bytes() <= peak
