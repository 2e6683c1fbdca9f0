import json
from pathlib import Path

import pytest

from gpp.errors import InvalidConfig
from gpp.loggers.base import AbstractLogger, RunInfo
from gpp.loggers.jsonl import JsonlRecord
from gpp.loggers.wandb import Wandb
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


@pytest.mark.parametrize("settings", [{"mode": "sometimes"}, {"project": ""}])
def test_bad_settings_are_refused(settings: dict[str, str]) -> None:
    with pytest.raises(InvalidConfig, match="Fix:"):
        Wandb(**settings)


@pytest.mark.parametrize("names", [[], ["wandb"], ["tensorboard"], ["wandb", "tensorboard"]])
def test_options_are_loggers_by_name_and_go_together(names: list[str]) -> None:
    found = option("logger", f"[{','.join(names)}]")
    assert list(found) == names and all(isinstance(logger, AbstractLogger) for logger in found.values())
    assert option("logger", "none") == {}
