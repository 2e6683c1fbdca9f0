"""Documented commands of `run.py` answered in one process, up to the point where something would be measured or started."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpp import Analytical, Optimal
from gpp.app import cli
from gpp.app.command_line import flags_of_command
from gpp.app.several import SEVERAL
from gpp.errors import GppError, InvalidConfig
from tests.support.documented import Command, documented
from tests.support.one_process import answered
from tests.support.pages import TUTORIAL

CHECKED = "is what the page shows, and was checked"
FOLLOWED = tuple(page.name for page in TUTORIAL)
COMMANDS = [c for c in documented() if ("run.py" in c.text or c.program == "gpp") and not c.where.startswith(FOLLOWED)]
"""All but the tutorial's, which are run one after the other."""

ELSEWHERE = re.compile(r" --help| --cfg| -sc |-cd mine|mode=new")
"""Commands without settings, or for a folder of the reader's (tests/app/test_cli.py, test_new_project.py)."""

COMPOSED = re.compile(r"^(torchrun|srun)|cluster=local_gpus| -cn | -m |engine\.launch=")
"""Commands that need cards, other machines or a launcher, or start many jobs: they are composed, and nothing is built of it."""


def check_and_plan(experiment: Any, recorder: Any) -> None:
    """A story that ends before anything is measured or written; a small model's plan is made, by analytical costs."""
    experiment.check()
    if (
        experiment.model.name == "digits"
        and experiment.mode not in SEVERAL
        and not isinstance(experiment.strategy.planner, Optimal)
    ):
        experiment = replace(experiment, cost=Analytical())
        captured = experiment.captured()
        problem = experiment.problem(captured, experiment.op_graph(captured))
        experiment.strategy.predict(experiment.make_plan(problem), problem)
    raise InvalidConfig("command", "", CHECKED, "")


def complaint(command: Command, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """What `run.py` says against a command typed in a folder; empty for nothing."""
    if ELSEWHERE.search(command.text):
        return ""
    own = [f"hydra.searchpath=[file://{folder / 'conf'}]"] if not {"-cd", "-cn"} & set(command.words) else []
    if not COMPOSED.search(command.text):
        code, out = answered([*command.words, *own], check_and_plan, monkeypatch, folder)
        return "" if code == InvalidConfig.exit_code and CHECKED in out else out
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["run.py", *command.words])
    words = [word for word in flags_of_command().words if not word.startswith(("hydra/", "hydra.", "hparams_search="))]
    jobs: list[list[str]] = [[]]
    for word in words:
        key, _, value = word.partition("=")
        several = value.split(",") if {"-m", "-cn"} & set(command.words) and value[:1] not in "[{" else [value]
        # Each value of each word once: all combinations are more than are needed to find a wrong one.
        jobs = [[*job, f"{key}={several[0]}"] for job in jobs] + [[*jobs[0], f"{key}={other}"] for other in several[1:]]
    for job in jobs:
        try:
            cli._composed([*job, "name=documented"])
        except Exception as error:
            return str(error if isinstance(error, GppError) else cli._composition_error(error, job))
    return ""
