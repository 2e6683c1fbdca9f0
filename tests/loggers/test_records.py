"""What runs tell their trackers one by one: lines of JSON, and a wandb run."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gpp.loggers.base import AbstractLogger, RunInfo
from gpp.loggers.jsonl import JsonlRecord
from gpp.loggers.wandb import Wandb, WandbRecord
from tests.support.conf import option


def lines_of(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_metrics_are_one_line_a_step(tmp_path: Path) -> None:
    with JsonlRecord(RunInfo(run_dir=tmp_path / "run", name="x")) as record:
        record.log(0, {"loss": 1.5})
        assert lines_of(tmp_path / "run" / "metrics.jsonl") == [{"step": 0, "loss": 1.5}]  # readable while the run goes on
        record.log(1, {"loss": float("nan")})
        record.log_eval(1, {"accuracy": 0.5})
        record.log_table("t", ["a"], [[1]])
        record.log_page("report", tmp_path / "missing.html")
    assert lines_of(tmp_path / "run" / "metrics.jsonl")[1:] == [
        {"step": 1, "loss": None},
        {"step": 1, "eval": {"accuracy": 0.5}},
    ]
    assert record.hints == () and record.warnings == ()
    record.finish()
    record.log(2, {"loss": 0.0})


def test_an_unwritable_place_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    record = JsonlRecord(RunInfo(run_dir=tmp_path / "file", name="x"))
    record.log(0, {"loss": 1.0})
    record.finish()
    assert len(record.warnings) == 1 and "not written" in record.warnings[0]


@pytest.mark.parametrize("names", [[], ["wandb"], ["tensorboard"], ["wandb", "tensorboard"]])
def test_options_are_loggers_by_name_and_go_together(names: list[str]) -> None:
    found = option("logger", f"[{','.join(names)}]")
    assert list(found) == names and all(isinstance(logger, AbstractLogger) for logger in found.values())
    assert option("logger", "none") == {}


def no_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))


def test_offline_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """One real run, asked to be online without a key: recorded offline, silently, with the lines to look at it."""
    no_key(monkeypatch, tmp_path)
    monkeypatch.chdir(tmp_path)
    page, run_dir = tmp_path / "report.html", tmp_path / "run"
    page.write_text("<p>report</p>")
    logger = Wandb(mode="online", system_metrics=False, tags=("a",))
    with logger.start(RunInfo(run_dir=run_dir, name="digits-graphpipe", config={"a": {"b": 1}}, group="sweep")) as record:
        record.log(0, {"loss": 1.0})
        record.log_eval(0, {"accuracy": 0.5})
        record.log_table("plan", ["stage", "devices"], [["s0", "d0"]])
        record.log_page("report", page)
        record.log_file(page)
        record.finish({"predicted": {"iteration_s": 0.5}})
    stored = list((run_dir / "wandb").glob("offline-run-*"))
    assert len(stored) == 1 and list(stored[0].glob("*.wandb")) and list(stored[0].rglob("*.html"))
    # What lines do stands before them, so that they can be copied whole, and are not broken in a terminal.
    assert record.hints[1:] == ("wandb leet run/wandb/latest-run", "wandb sync run/wandb/latest-run")
    assert len(record.warnings) == 1 and "no wandb key" in record.warnings[0]
    out = capfd.readouterr()
    assert out.out == "" and out.err == ""


class Broken:
    """A wandb run whose calls fail."""

    offline = True
    settings = type("Settings", (), {"sync_dir": "/x y", "mode": "offline"})()
    finished = 0

    def log(self, values: object) -> None:
        raise OSError("disk full")

    def finish(self, exit_code: int = 0) -> None:
        Broken.finished += 1


class Kept(Broken):
    """A wandb run that keeps what it is told."""

    def __init__(self) -> None:
        self.points: list[dict[str, float]] = []

    def log(self, values: Any) -> None:
        self.points.append(values)

    def finish(self, exit_code: int = 0) -> None:
        assert not exit_code


def test_steps_between_two_points_are_left_out_but_never_the_last() -> None:
    run = Kept()
    record = WandbRecord(lambda: run, every_s=3600.0)
    for step in range(4):
        record.log(step, {"loss": float(step)})
    record.log_eval(3, {"accuracy": 0.5})
    for step in range(4, 6):
        record.log(step, {"loss": float(step)})
    record.finish()
    assert run.points == [
        {"step": 0, "loss": 0.0},
        {"step": 3, "loss": 3.0},
        {"step": 3, "eval/accuracy": 0.5},
        {"step": 5, "loss": 5.0},
    ]


def test_a_failure_is_a_warning_and_ends_the_record() -> None:
    record = WandbRecord(Broken)
    assert record.hints[1:] == ("wandb leet '/x y'", "wandb sync '/x y'")
    record.log(0, {"loss": 1.0})
    record.log(1, {"loss": 1.0})
    record.finish({"a": 1})
    assert len(record.warnings) == 1 and "disk full" in record.warnings[0] and Broken.finished == 1


def test_a_failing_start_is_a_warning() -> None:
    def fail() -> None:
        raise RuntimeError("no service")

    record = WandbRecord(fail)
    record.log(0, {})
    assert "no service" in record.warnings[0] and record.hints == ()


def test_disabled_needs_no_wandb(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from gpp.loggers.base import RunInfo; from gpp.loggers.wandb import Wandb; "
        f"r = Wandb(mode='disabled').start(RunInfo(run_dir=Path({str(tmp_path)!r}), name='x')); r.log(0, {{}}); r.finish(); "
        "assert 'wandb' not in sys.modules and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert not list(tmp_path.iterdir())
