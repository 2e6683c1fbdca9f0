"""Directories of runs and sweeps: nothing wrong is shown, nothing is lost, and every end is written down."""

from __future__ import annotations

import csv
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from gpp.app.multirun import digest_of, latest
from gpp.errors import InvalidConfig
from gpp.runtime.run_dir import EARLIER, RunDir, under_way
from tests.runtime.test_run_dir import files_of
from tests.support.cli import ROOT, TOWERS, run
from tests.support.long import thinned

SMALL = [*TOWERS, "model.factory=tests.support.zoo.Towers", "logger=none", "cost=analytical", "engine=simulate", "explain_s=0"]
ENDING = [word.replace("Towers", "Ending") for word in SMALL]

REFUSED = [
    ["model.factory=tests.support.zoo.Undecided"],
    ["steps=-1"],
    ["model.factory=tests.support.zoo.Leaving"],
    ["strategy=even", "cluster.num_devices=50"],
    ["engine=distributed", "engine.launch=external", "engine.nodes=2"],
]
"""Found in the capture, by a setting, by a model's code that ends the process, in the problem, and by the engine for its job."""


def rows_of(folder: Path) -> list[dict[str, str]]:
    with (folder / "results.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a finished run."""
    folder = tmp_path_factory.mktemp("old") / "run"
    assert run(folder, *SMALL).code == 0
    return folder


@pytest.mark.parametrize("words", thinned(REFUSED), ids=" ".join)
def test_a_refused_command_leaves_everything_as_it_was(old: Path, words: list[str]) -> None:
    before = files_of(old)
    done = run(old, *SMALL, *words)
    assert done.code == 2 and done.out.count("error: ") == 1
    assert files_of(old) == before


def test_a_refused_command_leaves_no_folder(tmp_path: Path) -> None:
    assert run(tmp_path / "new" / "folder", *SMALL, "strategy=even", "cluster.num_devices=50").code == 2
    done = run(tmp_path / "sweep", "-m", *SMALL, "strategy=even,mistyped")
    assert done.code == 2 and "strategy=mistyped" in done.out
    assert not list(tmp_path.iterdir())


def test_what_is_no_refusal_sets_the_earlier_run_aside(tmp_path: Path) -> None:
    ends = (([], 0, "ok"), (["cluster.memory_bytes=1e3"], 3, "infeasible"), ([], 0, "ok"))
    for words, code, status in ends:
        done = run(tmp_path, *SMALL, *words)
        assert (done.code, done.result["status"]) == (code, status)
    earlier = [json.loads((tmp_path / EARLIER / number / "result.json").read_text()) for number in "12"]
    assert [result["status"] for result in earlier] == ["ok", "infeasible"]
    assert all(words in earlier[1]["reason"] for words in ("lacks", "Smallest change that fits"))
    assert (tmp_path / EARLIER / "1" / "report.html").exists()
    assert yaml.safe_load((tmp_path / "config.yaml").read_text())["model"]["factory"] == "tests.support.zoo.Towers"


def test_the_second_of_two_runs_in_a_directory_is_refused(tmp_path: Path) -> None:
    with RunDir(tmp_path, command="python run.py steps=7") as directory:
        directory.claim()
        before = files_of(tmp_path)
        for words in (SMALL, ["-m", *SMALL, "seed=1,2"]):
            done = run(tmp_path, *words)
            assert done.code == 2
            assert f"is in use by process {os.getpid()} on" in done.out and "(python run.py steps=7)" in done.out
        assert files_of(tmp_path) == before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_before_the_workers_start_is_a_result(tmp_path: Path, number: signal.Signals) -> None:
    done = run(tmp_path / "run", *ENDING, ENDING=str(int(number)))
    assert done.code == 128 + number
    assert (done.result["status"], done.result["reason"]) == ("failed", f"stopped by {number.name}")
    assert "Traceback" not in done.out and not (tmp_path / "run" / ".lock").exists()


def test_a_signal_that_a_library_swallows_ends_the_run(tmp_path: Path) -> None:
    swallowed = [word.replace("Towers", "Swallowing") for word in SMALL]
    done = run(tmp_path / "run", *swallowed, ENDING=str(int(signal.SIGTERM)))
    assert done.code == 128 + signal.SIGTERM
    assert (done.result["status"], done.result["reason"]) == ("failed", "stopped by SIGTERM")


HOOK = """
import os, signal, sys

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ["INTERRUPTED"]:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
"""
"""A module that sends this process a Ctrl-C at the instant at which it begins to import another one."""


@pytest.mark.parametrize(
    ("script", "module"), [("run.py", "numpy"), ("tests/support/gpp_command.py", "numpy"), ("run.py", "gpp.app.recording")]
)
def test_ctrl_c_during_an_import_is_one_line(tmp_path: Path, script: str, module: str) -> None:
    """With numpy nothing runs yet; the recorder's imports come when signals are exceptions, which imports may swallow."""
    (tmp_path / "sitecustomize.py").write_text(HOOK)
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}", "INTERRUPTED": module}
    words = [sys.executable, script, "logger=none", "mode=plan", f"hydra.run.dir={tmp_path / 'run'}"]
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stderr, done.stdout) == (130, "error: stopped by SIGINT\n", "")
    assert not (tmp_path / "run").exists()


def test_a_terminal_that_goes_away_ends_no_run(tmp_path: Path) -> None:
    """Nobody reads on, and the encoding knows no letters but ASCII's."""
    folder = tmp_path / "Läufe 模型"
    words = shlex.join([sys.executable, "run.py", *SMALL, f"hydra.run.dir='{folder}'"])
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "ascii"}
    line = ["bash", "-c", f"{words} 2>&1 | true; exit ${{PIPESTATUS[0]}}"]
    done = subprocess.run(line, cwd=ROOT, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0 and not done.stderr
    assert json.loads((folder / "result.json").read_text())["status"] == "ok"


def test_a_full_disk_is_said_in_a_line(old: Path, tmp_path: Path) -> None:
    """No file may be longer than 4 kB; job/model.json is."""
    assert (old / "job" / "model.json").stat().st_size > 1 << 12
    command = shlex.join([sys.executable, "run.py", *SMALL, f"hydra.run.dir={tmp_path}"])
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    line = ["bash", "-c", f"ulimit -f 4; {command}"]
    done = subprocess.run(line, cwd=ROOT, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 1 and "Traceback" not in done.stdout + done.stderr
    assert "File too large. Fix: make room there" in " ".join((done.stdout + done.stderr).split())
    assert json.loads((tmp_path / "result.json").read_text())["status"] == "failed"


@pytest.mark.parametrize(
    ("number", "code", "reasons"),
    [
        (signal.SIGTERM, 128 + signal.SIGTERM, ["stopped by SIGTERM", "no result: the sweep was stopped by SIGTERM"]),
        (signal.SIGKILL, -signal.SIGKILL, ["no result: the sweep was under way when this was written"] * 2),
    ],
)
def test_a_signal_stops_a_sweep_with_a_table(tmp_path: Path, number: signal.Signals, code: int, reasons: list[str]) -> None:
    factories = "model.factory=tests.support.zoo.Towers,tests.support.zoo.Ending,tests.support.zoo.Leaving"
    done = run(tmp_path, "-m", *SMALL, factories, ENDING=str(int(number)))
    assert done.code == code, done.out
    rows = rows_of(tmp_path)
    assert [row["status"] for row in rows] == ["ok", "failed", "failed"]
    assert [row["reason"] for row in rows[1:]] == reasons
    assert (tmp_path / "report.html").exists() and "Traceback" not in done.out


def test_a_sweep_shows_each_job_its_own_result(tmp_path: Path) -> None:
    """After another order of the words, another set of values, and another version of a file that a setting names."""
    strategies, seeds = "strategy=even,sequential", "seed=1"
    assert run(tmp_path / "sweep", "-m", *SMALL, strategies, seeds).code == 0
    again = run(tmp_path / "sweep", "-m", *SMALL, seeds, strategies)
    assert again.code == 0 and again.out.count("skip") == 2
    rows = rows_of(tmp_path / "sweep")
    assert [(row["seed"], row["strategy"]) for row in rows] == [("1", "even"), ("1", "sequential")]
    jobs = json.loads((tmp_path / "sweep" / "jobs.json").read_text())
    for row, job in zip(rows, jobs, strict=True):
        assert {f"seed={row['seed']}", f"strategy={row['strategy']}"} <= set(job["overrides"])
    edited = run(tmp_path / "sweep", "-m", *SMALL, "strategy=even", "seed=1")
    assert edited.code == 0 and edited.out.count("skip") == 1
    assert [(row["seed"], row["strategy"]) for row in rows_of(tmp_path / "sweep")] == [("1", "even")]
    assert json.loads((tmp_path / "sweep" / "summary.json").read_text())["num_jobs"] == 1


def test_a_refused_job_of_a_sweep_is_a_row(tmp_path: Path) -> None:
    done = run(tmp_path, "-m", *SMALL, "strategy=even", "cluster.num_devices=50", "steps=1,-1")
    assert done.code == 1
    rows = rows_of(tmp_path)
    assert [row["status"] for row in rows] == ["failed", "failed"]
    assert (
        "cluster.num_devices=50: strategy.planner=even makes a stage" in rows[0]["reason"]
        and "steps=-1: must be an integer" in rows[1]["reason"]
    )


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({}, True),
        ({"name": "other", "cache_dir": "/elsewhere", "logger": {"_target_": "none"}}, True),
        ({"steps": 4}, False),
        ({"model": {"path": "$FILE", "hidden": 3}}, False),
        ({"mode": "compare"}, False),
    ],
)
def test_the_configuration_of_a_job_is_what_decides_its_result(tmp_path: Path, change: dict[str, Any], same: bool) -> None:
    (tmp_path / "profile.json").write_text("1")
    base = {"name": "a", "steps": 3, "mode": "plan", "cache_dir": "/tmp", "logger": {}, "model": {"path": "$FILE", "hidden": 2}}

    def digest(config: dict[str, Any]) -> str:
        return digest_of(OmegaConf.create(json.loads(json.dumps(config).replace("$FILE", str(tmp_path / "profile.json")))))

    assert (digest({**base, **change}) == digest(base)) == same
    assert digest(dict(reversed(base.items()))) == digest(base)
    before = digest(base)
    (tmp_path / "profile.json").write_text("2")
    assert digest(base) != before


def test_a_file_that_any_setting_names_decides_the_result_too(tmp_path: Path) -> None:
    """That of a cost model, or of one of several parts; but no data set, which may be too large to be read for a hash."""
    (tmp_path / "a").write_text("1")
    named = {"path": str(tmp_path / "a")}
    configs = [{"cost": named}, {"strategy": {"planner": named}}, {"strategy": {"mechanisms": [named]}}, {"data": named}]
    before = [digest_of(OmegaConf.create(config)) for config in configs]
    (tmp_path / "a").write_text("2")
    after = [digest_of(OmegaConf.create(config)) for config in configs]
    assert [a == b for a, b in zip(before, after, strict=True)] == [False, False, False, True]


def test_a_users_own_strategies_decide_the_result_of_a_comparison(tmp_path: Path) -> None:
    mine = tmp_path / "strategy" / "mine.yaml"
    mine.parent.mkdir()

    def digest(text: str) -> str:
        mine.write_text(text)
        with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
            words = ["mode=compare", "name=test", f"hydra.searchpath=[file://{tmp_path}]"]
            config = compose("config", overrides=words, return_hydra_config=True)
        HydraConfig.instance().set_config(config)
        try:
            return digest_of(config)
        finally:
            HydraConfig.instance().cfg = None

    assert digest("name: mine") == digest("name: mine") != digest("name: other")


@pytest.mark.dist
def test_a_signal_while_it_trains_is_a_result(tmp_path: Path) -> None:
    """And meanwhile a second run is refused by the lock of the first."""
    words = ["engine=distributed", "cluster.num_devices=2", "minibatch_size=32", "steps=1000000", "strategy=even"]
    with ThreadPoolExecutor() as pool:
        first = pool.submit(run, tmp_path, *SMALL, *words)
        log = tmp_path / "metrics.jsonl"
        while not (log.exists() and log.stat().st_size):
            assert not first.done()
            time.sleep(0.05)
        with pytest.raises(InvalidConfig, match="is in use by process"):
            RunDir(tmp_path).claim()
        here = under_way(tmp_path)
        assert here is not None
        os.kill(here.pid, signal.SIGTERM)
        done = first.result()
    assert done.code == 128 + signal.SIGTERM and "Traceback" not in done.out
    assert (done.result["status"], done.result["reason"]) == ("failed", "stopped by SIGTERM")
    assert done.result["loss"] and done.result["predicted"] and (tmp_path / "report.html").exists()


def test_a_link_that_cannot_be_set_is_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "outputs" / "latest" / "mine").mkdir(parents=True)
    latest(tmp_path / "outputs" / "run")
    assert "latest does not lead to this run" in capsys.readouterr().err
