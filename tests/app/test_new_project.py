"""mode=new: what is written composes, builds and has data; python run.py in it is the command of its README."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate

from gpp.app import command
from gpp.app.new_project import write_project
from gpp.errors import InvalidConfig
from tests.support.conf import CONF


def test_the_project_composes_and_has_a_model_and_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "My-Towers"
    assert str(path) in write_project(["mode=new", f"path={path}"])
    for source in path.rglob("*.py"):
        ast.parse(source.read_text())
    assert not [file for file in path.rglob("*") if "PACKAGE" in file.name or (file.is_file() and "PACKAGE" in file.read_text())]
    with initialize_config_dir(str(path / "conf"), version_base="1.3"):
        cfg = compose("project", overrides=[f"hydra.searchpath=[file://{CONF}]", "name=test"])
    monkeypatch.syspath_prepend(str(path))
    model, data = (instantiate(cfg[part], _convert_="all") for part in ("model", "data"))
    data.check(model)
    assert sum(p.numel() for p in model.build().parameters()) > 0
    assert len(data.load("train", model, seed=0, dtype="float32")) == 1024


@pytest.mark.parametrize("words", [[], ["path="], ["path={}/gpp"], ["path={}"], ["path={}/new", "steps=3"]])
def test_what_cannot_be_written_is_refused(words: list[str], tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    with pytest.raises(InvalidConfig, match="Fix: "):
        write_project(["mode=new", *(word.format(tmp_path) for word in words)])
    assert [file.name for file in tmp_path.iterdir()] == ["mine"]


def test_the_command_takes_a_folder_of_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ran: list[str] = []
    monkeypatch.setattr(command.runpy, "run_path", lambda path, run_name: ran.append(path))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setattr(sys, "argv", ["run.py", "steps=3"])
    command.main(conf=tmp_path, name="project")
    assert sys.argv[1:] == ["-cd", str(tmp_path), "-cn", "project", "steps=3"]
    command.main(conf=CONF)  # a folder that was named by hand stays
    assert sys.argv.count("-cd") == 1
    assert ran == [str(CONF.parent / "run.py")] * 2


def test_the_first_word_may_be_a_mode(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.as_mode(["plan", "model=digits"]) == ["mode=plan", "model=digits"]
    assert command.as_mode(["run", "-m", "seed=0,1"]) == ["mode=train", "-m", "seed=0,1"]
    for unchanged in ([], ["--help"], ["-m", "seed=0,1"], ["mode=plan"]):
        assert command.as_mode(unchanged) == unchanged
    with pytest.raises(SystemExit, match="2"):
        command.as_mode(["paln"])
    assert "gpp paln: no such command; choose run, train, plan, " in capsys.readouterr().err
