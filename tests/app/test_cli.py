"""The command line: what a user sees when all is well, when the input is bad, and when a worker dies."""

from __future__ import annotations

import csv
import json
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gpp.runtime.hang_detection.watch import said_pids
from tests.support.cli import TOWERS, run, start, workers_of
from tests.support.inprocess import few_layers
from tests.support.traces import check_trace

QUICK = ["logger=none", "cluster.num_devices=2", "steps=2", "evaluate_every=0", "cost=analytical"]
DIGITS = few_layers("digits")


def test_more_devices_than_operators(tmp_path: Path) -> None:
    """Planners that replicate, or leave devices idle, may have them; one that makes a stage for each device may not."""
    words = ["logger=none", "experiment=paper", "model=random", "model.num_ops=8", "graph.max_ops=8", "cluster=summit_8x4"]
    words += ["mode=plan", "minibatch_size=64", "explain_s=0"]
    done = run(tmp_path, *words)
    assert done.code == 0
    assert done.result["plan"]["num_ops"] == 8 and 8 < done.result["plan"]["num_devices"] <= 32
    refused = run(tmp_path / "even", *words, "strategy=even")
    assert refused.code == 2
    assert "makes a stage for each device, and 8 operators are enough for 8" in " ".join(refused.out.split())


def test_an_uncapturable_model_names_the_users_line(tmp_path: Path) -> None:
    done = run(tmp_path, "logger=none", *TOWERS, "model.factory=tests.support.zoo.Undecided")
    assert done.code == 2
    assert "zoo.py" in done.out
    assert "x.sum().item() > 0" in done.out
    assert "Traceback" not in done.out


def test_torchrun_is_refused_unless_a_setting_expects_it(tmp_path: Path) -> None:
    done = run(tmp_path, RANK="0", WORLD_SIZE="2")
    assert done.code == 2
    assert "RANK='0': is set by a launcher" in done.out and "add engine.launch=env (torchrun" in done.out


def test_help_lists_every_option(tmp_path: Path) -> None:
    done = run(tmp_path, "--help")
    assert done.code == 0
    for word in ("mmt_small", "graphpipe", "summit_8x4", "distributed", "profiled", "adamw", "wandb", "Examples:"):
        assert word in done.out
    assert done.out.count("python run.py ") >= 6


@pytest.mark.dist
def test_a_run_keeps_the_contract(tmp_path: Path) -> None:
    # What several stages on a device hold is predicted too high: each with what it takes while it computes, as if all did at once.
    apart = ["strategy.planner.replication=false", "strategy.planner.colocate=never"]
    done = run(tmp_path, *QUICK, *DIGITS, "steps=30", "evaluate_every=15", "microbatch_size=16", *apart)
    assert done.code == 0, done.out
    result = done.result
    assert result["status"] == "ok"
    assert (result["model"], result["strategy"], result["cluster"], result["engine"], result["seed"]) == (
        "digits",
        "graphpipe",
        "local",
        "distributed",
        0,
    )
    assert len(result["loss"]) == 30
    assert result["loss"][-1] < 0.5 * result["loss"][0]
    assert result["final_metric"]["accuracy"] > 0.5
    assert result["plan"]["num_devices"] == 2
    assert set(result["plan"]["microbatch_sizes"].values()) == {16}
    for source in ("predicted", "measured"):
        metrics = result[source]
        assert metrics["iteration_s"] > 0
        assert 0 <= metrics["bubble_fraction"] < 1
        assert set(metrics["peak_memory_bytes"]) == {"0", "1"}
        assert set(metrics["weight_versions"].values()) == {1}
    for device in "01":
        assert result["measured"]["peak_memory_bytes"][device] == pytest.approx(
            result["predicted"]["peak_memory_bytes"][device], rel=0.1
        )
    assert result["measured"]["communication_bytes"] == pytest.approx(result["predicted"]["communication_bytes"], rel=0.01)
    assert not check_trace(json.loads((tmp_path / "trace.json").read_text()))
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) >= 30
    for name in (
        "report.html",
        "timeline.json",
        "job/plan.json",
        "job/program.txt",
        "job/model.json",
        "checkpoints/final/stage_0.safetensors",
    ):
        assert (tmp_path / name).stat().st_size > 0
    timeline = json.loads((tmp_path / "timeline.json").read_text())
    order = {
        source: [[e[1:4] for e in timeline[source]["events"] if e[0] == d and e[1] in "FB"] for d in (0, 1)] for source in timeline
    }
    assert order["predicted"] == order["measured"]


@pytest.mark.dist
def test_a_killed_worker_ends_the_run(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    with ThreadPoolExecutor() as pool:
        running = pool.submit(run, tmp_path, *QUICK, *DIGITS, "steps=1000000", "strategy.planner.replication=false")
        while not (metrics.exists() and metrics.stat().st_size):
            assert not running.done()
            time.sleep(0.05)
        workers = said_pids(tmp_path / "ranks", 2)
        os.kill(workers[1], signal.SIGKILL)
        # Far less than engine.timeout_s: its death is seen, not its silence.
        done = running.result(timeout=60)
    assert done.code == 1
    assert "killed by SIGKILL" in done.out
    assert len({*workers.values()}) == 2 and not any(Path(f"/proc/{pid}").exists() for pid in workers.values())
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["status"] == "failed"
    assert "worker 1" in result["reason"] or "worker 0" in result["reason"]
    assert len(result["loss"]) > 0
    assert result["checked"]["unknown"] is None and result["checked"]["seconds"] > 0


@pytest.mark.long
@pytest.mark.dist
def test_a_controller_that_dies_leaves_no_worker(tmp_path: Path) -> None:
    """They have not trained yet, or not even imported anything; `tests.checks.kills` has all the other instants."""
    process = start(tmp_path, *QUICK, "steps=1000000")
    until = time.monotonic() + 120
    while not workers_of(tmp_path) and time.monotonic() < until:
        time.sleep(0.001)
    assert workers_of(tmp_path)
    process.kill()
    process.communicate()
    until = time.monotonic() + 10
    while workers_of(tmp_path) and time.monotonic() < until:
        time.sleep(0.1)
    assert not workers_of(tmp_path)


@pytest.mark.dist
def test_a_sweep_survives_an_infeasible_and_a_crashing_job_and_resumes(tmp_path: Path) -> None:
    words = [
        "-m",
        *QUICK,
        *TOWERS,
        "model.factory=tests.support.zoo.Towers",
        "cluster.num_devices=1",
        "graph.max_ops=4",
        "minibatch_size=32",
        "cluster.memory_bytes=1e9,100",
        "+data.args.broken=false,true",
    ]
    first = run(tmp_path, *words)
    assert first.code == 1
    assert "the disk with the samples is gone" in first.out
    with open(tmp_path / "results.csv") as file:
        rows = list(csv.DictReader(file))
    assert [row["status"] for row in rows] == ["ok", "failed", "infeasible", "infeasible"]
    assert float(rows[0]["measured.iteration_s"]) > 0
    assert "OSError: the disk with the samples is gone" in rows[1]["reason"]
    assert "Smallest change that fits" in rows[2]["reason"]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary
    assert (tmp_path / "report.html").exists()
    first_job = tmp_path / json.loads((tmp_path / "jobs.json").read_text())[0]["folder"]
    before = (first_job / "result.json").stat().st_mtime
    second = run(tmp_path, *words)
    assert second.out.count("skip") == 3
    assert (first_job / "result.json").stat().st_mtime == before


@pytest.mark.dist
def test_batch_norm_warns_and_a_fixed_batch_runs(tmp_path: Path) -> None:
    words = ("model.factory=tests.support.zoo.Towers", "minibatch_size=32", "microbatch_size=8")
    done = run(tmp_path / "norm", *QUICK, *TOWERS, *words, "mode=plan", "explain_s=0")
    assert done.code == 0, done.out
    assert "batch statistics differ" in done.out
    losses = []
    for engine in ("distributed", "single"):
        done = run(
            tmp_path / engine,
            *QUICK,
            *TOWERS,
            "model.factory=tests.support.zoo.FixedBatch",
            "minibatch_size=32",
            "microbatch_size=8",
            "graph.max_ops=4",
            f"engine={engine}",
            "dtype=float64",
            "baselines_s=0",
        )
        assert done.code == 0, done.out
        losses.append(done.result["loss"])
        if engine == "distributed":
            assert "captured at the fixed batch size 8" in done.out
        # The data set names no splits, so what is called held out must be.
        assert "are held out from training" in " ".join(done.out.split())
        assert "are held out from training" in (tmp_path / engine / "report.html").read_text()
    assert losses[0] == pytest.approx(losses[1], abs=1e-9)
