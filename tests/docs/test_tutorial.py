"""The tutorial, followed literally in an empty folder and in order: every file written, and the commands run that only plan.

The long test runs all of them. They run in forks of a process that has imported everything, as all runs of the tests do;
`python -m tests.checks.tutorial` runs them as processes of a shell, and says how long each takes.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.cli import environment
from tests.support.pages import ROOT, TUTORIAL, blocks, commands
from tests.support.warm import warm

COMMAND = ROOT / "tests" / "support" / "gpp_command.py"


class Reader:
    """Somebody who types what a page says.

    Args:
        folder: where they are.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.env = folder, environment()
        self.shown: dict[str, str] = {}

    def follow(self, page: Path, only: str = "") -> None:
        """Write every file, and run every command in which `only` is found; a command that fails ends it."""
        for block in blocks(page):
            if block.file:
                path = self.folder / block.file
                assert path.parent.is_dir(), f"{block.file}: its folder is not made before"
                path.write_text(block.text)
            elif block.language == "sh":
                for line in commands(block):
                    if re.search(only, line):
                        self.type(line)

    def type(self, line: str) -> None:
        program, *words = shlex.split(line)
        if program in ("python", "gpp"):
            out = self.folder / f"out{len(self.shown)}.txt"
            script, words = (str(self.folder / words[0]), words[1:]) if program == "python" else (str(COMMAND), words)
            code = warm().run(words, self.env, out, folder=self.folder, script=script)
            self.shown[line] = out.read_text()
            assert code == 0, f"{line}\n{self.shown[line]}"
        else:
            subprocess.run([program, *words], cwd=self.folder, check=True)

    def results(self) -> list[dict[str, Any]]:
        """result.json of the runs below outputs/, in the order of their start."""
        files = sorted(self.folder.glob("outputs/*/*/result.json"), key=lambda file: file.parent.name)
        return [json.loads(file.read_text()) for file in files]


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Reader:
    """Somebody who has followed the tutorial, without training."""
    found = Reader(tmp_path_factory.mktemp("mine"))
    for page in TUTORIAL:
        found.follow(page, only="^mkdir|mode=")
    return found


def check_compared(result: dict[str, Any]) -> None:
    found = {row["strategy"]: row["predicted"]["iteration_s"] for row in result["compared"]}
    assert min(found, key=found.__getitem__) == "graphpipe" and "halves" in found


@pytest.mark.dist
def test_its_plans_are_what_it_says(reader: Reader) -> None:
    planned, compared = reader.results()
    assert planned["predicted"]["iteration_s"] > 0 and planned["measured"] is None
    check_compared(compared)


@pytest.mark.long
@pytest.mark.dist
def test_the_tutorial_does_what_it_says(tmp_path: Path) -> None:
    reader = Reader(tmp_path)
    for page in TUTORIAL:
        reader.follow(page)
    loop = next(out for line, out in reader.shown.items() if line == "python train.py")
    assert re.search(r"^ *s0 .*\b(picture|embed|caption)\b", loop, re.M), loop  # the modules of a stage, as the page promises
    assert float(loop.rsplit("accuracy", 1)[1].split()[0]) > 0.95
    assert (reader.folder / "model.pt").is_file() and (reader.folder / "runs/loop/report.html").is_file()

    trained, planned, emulated, compared = reader.results()
    assert trained["loss"][-1] < trained["loss"][0]
    assert planned["predicted"]["iteration_s"] > 0 and planned["measured"] is None
    assert emulated["measured"]["iteration_s"] > 0
    check_compared(compared)


@pytest.mark.dist
def test_the_lines_of_the_readme_run(reader: Reader) -> None:
    """With the model and the data of the tutorial."""
    (lines,) = [block.text for block in blocks(ROOT / "README.md") if block.language == "python"]
    own = reader.folder.joinpath("train.py").read_text().split("inputs, labels")[0]
    (reader.folder / "readme.py").write_text(own + lines)
    reader.type("python readme.py")
    assert reader.shown["python readme.py"].strip().endswith("outputs/pipeline/report.html")
