"""Every command and every Python block of README.md and docs/ does what the page says, or is refused by nothing.

What the suite does with each, so that all of them together take seconds:

* The tutorial is followed literally, and the README's lines with it (tests/docs/test_tutorial.py).
* Commands of `run.py` and `gpp` are answered in one process: composed, built and checked as in a run, with the files that the pages
  call yours. Where the model is `digits`, which the suite captures anyway, they are also planned, by analytical costs.
* What needs cards, other machines, a launcher or a sweep's many jobs is composed alone (tests/test_conf.py builds the options).
* Python blocks run as they are, in one process, with a model and data under the names that the text calls yours; the one that loads
  T5 is only compiled.

`python -m tests.check_docs` runs the commands and all blocks, as processes, to their end.
"""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import run
from gpp.app import cli
from gpp.app.several import SEVERAL
from gpp.cost.models.analytical import Analytical
from gpp.errors import InvalidConfig
from gpp.planners.bounds.optimal import Optimal
from tests.support.cli import environment
from tests.support.documented import Command, documented, prepare, python_blocks
from tests.support.documented_python import write_script
from tests.support.one_process import answered
from tests.support.pages import ROOT
from tests.support.warm import warm

CHECKED = "is what the page shows, and was checked"
FOLLOWED = ("tutorial.md",)
"""Pages whose commands run one after the other in a test of their own."""

COMPOSED = re.compile(r"^(torchrun|srun)|cluster=local_gpus| -cn | -m |hydra/launcher|--cfg|engine\.launch|-cd mine|mode=new")
COMMANDS = [command for command in documented() if not command.where.startswith(FOLLOWED)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with all that the commands name, and an earlier run in outputs/latest."""
    path = tmp_path_factory.mktemp("documented")
    prepare(path)
    sys.path.insert(0, str(path))
    with pytest.MonkeyPatch.context() as patch:
        words = ["logger=none", "cost=analytical", "engine=reference", "steps=2", "checkpoint.every=1", "evaluate_every=0"]
        code, out = answered([*words, "baselines_s=0"], run.story, patch, path)
    assert code == 0, out
    yield path
    sys.path.remove(str(path))


def check_and_plan(experiment: Any, recorder: Any) -> None:
    """A story that ends before anything is measured or written."""
    experiment.check()
    if experiment.model.name == "digits" and experiment.mode not in SEVERAL and not isinstance(experiment.strategy.planner, Optimal):
        experiment = replace(experiment, cost=Analytical())
        captured = experiment.captured()
        problem = experiment.problem(captured, experiment.op_graph(captured))
        plan = experiment.make_plan(problem)
        experiment.strategy.predict(plan, problem)
    raise InvalidConfig("command", "", CHECKED, "")


@pytest.mark.parametrize("command", [c for c in COMMANDS if "run.py" in c.text or c.program == "gpp"], ids=lambda c: c.where)
def test_a_command_is_refused_by_nothing(command: Command, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = [f"hydra.searchpath=[file://{folder / 'conf'}]"] if not {"-cd", "-cn"} & set(command.words) else []
    if not COMPOSED.search(command.text):
        # Words behind the documented ones, which change nothing in what is checked: a tracker would write a record.
        code, out = answered([*command.words, *own], check_and_plan, monkeypatch, folder)
        assert code == 2 and CHECKED in out, out
        return
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["run.py", *command.words])
    if "-cd mine" in command.text or "mode=new" in command.text or "--cfg" in command.text:
        return  # a folder of the reader's; tests/app/test_new_project.py and test_cli.py have these
    words = [word for word in cli._flags().words if not word.startswith(("hydra/", "hydra.", "hparams_search="))]
    jobs: list[list[str]] = [[]]
    for word in words:
        key, _, value = word.partition("=")
        several = value.split(",") if "-m" in command.words and not value.startswith(("[", "{")) else [value]
        # Each value of each word once: all combinations are more than are needed to find a wrong one.
        jobs = [[*job, f"{key}={several[0]}"] for job in jobs] + [[*jobs[0], f"{key}={other}"] for other in several[1:]]
    for job in jobs:
        assert cli._composed([*job, "name=documented"]) is not None


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.program in ("python -m", "make")], ids=lambda c: c.where)
def test_a_program_that_is_named_is_there(command: Command) -> None:
    if command.program == "make":
        assert re.search(rf"^{command.text.split()[1]}:", (ROOT / "Makefile").read_text(), re.M)
    else:
        assert importlib.util.find_spec(command.text.split("python -m ")[1].split()[0]) is not None


@pytest.mark.dist
def test_the_blocks_of_python_run_as_they_are(folder: Path) -> None:
    script = write_script(folder, [block for block in python_blocks() if not block.where.startswith("README")], loads=False)
    out = folder / "python.txt"
    code = warm().run([], environment(), out, folder=folder, script=str(script))
    ended: dict[str, str] = json.loads((folder / "blocks.json").read_text()) if (folder / "blocks.json").exists() else {}
    assert code == 0 and ended and not {where: error for where, error in ended.items() if error}, f"{ended}\n{out.read_text()}"
    # The page shows what is printed: a plan of three stages, with these columns.
    assert re.search(r"^stage +operators +devices +micro-batch +in flight +next", out.read_text(), re.M)
