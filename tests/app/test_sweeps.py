"""Sweeps: each means something with every engine or is refused, and Hydra's launchers start its jobs in other processes."""

from __future__ import annotations

import csv
import itertools
import json
import shlex
from pathlib import Path

import pytest

from tests.support.cli import run, run_cold
from tests.support.one_process import answered, check_only
from tests.support.wrong_settings import ENGINES, SWEEPS, first_job, misfit

# The asynchronous one with the engine that needs nothing: its emulation's settings once fitted no other.
SHORT = {
    ("async_throughput", "simulate"),
    *((sweep, ENGINES[i // 4 % len(ENGINES)]) for i, sweep in enumerate(SWEEPS) if i % 16 == 1),
}


@pytest.mark.parametrize(
    ("sweep", "engine"),
    [pytest.param(*pair, marks=() if pair in SHORT else pytest.mark.long) for pair in itertools.product(SWEEPS, ENGINES)],
)
def test_a_sweep_runs_with_an_engine_or_is_refused(
    sweep: str, engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out = answered([*first_job(sweep, engine), f"hydra.run.dir={tmp_path}"], check_only, monkeypatch)
    assert not misfit(engine, code, out), out


@pytest.mark.parametrize(
    ("plugin", "words"),
    [
        ("hydra_joblib_launcher", ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]),
        ("hydra_submitit_launcher", ["hydra/launcher=submitit_local"]),
    ],
)
def test_jobs_in_other_processes_are_jobs_of_the_sweep(tmp_path: Path, plugin: str, words: list[str]) -> None:
    pytest.importorskip(f"hydra_plugins.{plugin}", reason="pip install -e '.[sweeps]'")
    # A configuration of the user's own, which the jobs' processes must find by the command line.
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "study.yaml").write_text("defaults: [config, _self_]\nseed: 7\nhydra: {searchpath: ['file://conf']}\n")
    sweep, flags = tmp_path / "sweep", ["-m", "-cd", str(tmp_path / "mine"), "-cn", "study"]
    said = ["logger=none", "cost=analytical", "engine=simulate", "strategy=sequential", "cluster.num_devices=2,1000"]
    done = run_cold(sweep, *flags, *words, *said)
    assert done.code == 1, done.out  # one job is refused: its model has fewer operators
    folders = [job["folder"] for job in json.loads((sweep / "jobs.json").read_text())]
    rows = list(csv.DictReader((sweep / "results.csv").read_text().splitlines()))
    assert [row["status"] for row in rows] == ["ok", "failed"]
    command = shlex.split(json.loads((sweep / folders[0] / "run.json").read_text())["command"])
    assert command[2:6] == ["-cd", str(tmp_path / "mine"), "-cn", "study"]
    assert "cluster.num_devices=2" in command
    # The plain launcher finds the same jobs done.
    again = run(sweep, *flags, *said)
    assert again.out.count("skip ") == 1
