"""Every command and every Python block of README.md and docs/ does what the page says.

Composing and checking a command takes half a second of computing, and there are 135; so the suite does this:

* The tutorial's files are written, its plans made, and the README's lines of Python run with them; the long test follows it
  literally (tests/docs/test_tutorial.py).
* Of every command of `run.py` and `gpp`, every word is looked up: the option and the setting must exist.
* Every 64th one is answered in one process, as in a run: composed, built, checked, and for a small model planned.
* Python blocks run as they are, in one process, with a model and data under the names that the text calls yours. Those that
  call `parallelize` are only compiled, but for one; the long test runs them, too. The block that loads T5 is only compiled.

`python -m tests.checks.docs` does the third with all commands, runs T5's block, and with `--run` every command to its end.
"""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cli import environment
from tests.support.documented import PAGES, Command, documented, prepare, python_blocks, unknown_words
from tests.support.documented_answers import COMMANDS, complaint
from tests.support.documented_python import write_script
from tests.support.pages import ROOT
from tests.support.warm import warm

SAMPLE = [command for i, command in enumerate(c for c in COMMANDS if "outputs/latest" not in c.text) if i % 64 == 3]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the files that the commands name."""
    path = tmp_path_factory.mktemp("documented")
    prepare(path)
    sys.path.insert(0, str(path))
    yield path
    sys.path.remove(str(path))


def test_the_collector_finds_what_the_pages_show() -> None:
    """Fenced, indented, broken over lines, in a row of a table, with what it does behind it."""
    found = {command.text for command in documented()}
    assert len(found) > 140
    assert any(text.startswith("gpp -cd conf") and "strategies=[graphpipe,sequential,halves]" in text for text in found)
    assert {"python run.py optimizer=adamw optimizer.lr=0.001", "python run.py logger=tensorboard", "make run"} <= found
    assert "python run.py model=mmt cluster=summit_8x4 mode=compare minibatch_size=512" in found
    assert any("optimizer.learning_rate.warmup_steps=20" in text and "shape=cosine" in text for text in found)
    assert {page.name for page in PAGES} >= {block.where.partition(":")[0] for block in python_blocks()}


def test_every_word_of_every_command_is_known(folder: Path) -> None:
    wrong = {command.where: unknown for command in COMMANDS if (unknown := unknown_words(command, folder))}
    assert not wrong
    typed = Command("", "python run.py strategy=graphpip optimizer.lrr=1 model.depth=8 strategies=[even,evn] -cn x data=synthetic")
    assert unknown_words(typed, folder) == ["strategy=graphpip", "optimizer.lrr=1"]


def test_every_program_that_is_named_is_there() -> None:
    for command in documented():
        if command.program == "make":
            assert re.search(rf"^{command.text.split()[1]}:", (ROOT / "Makefile").read_text(), re.M), command
        elif command.program == "python -m":
            assert importlib.util.find_spec(command.text.split("python -m ")[1].split()[0]) is not None, command


@pytest.mark.parametrize("command", SAMPLE, ids=lambda command: command.where)
def test_a_command_is_refused_by_nothing(command, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not complaint(command, folder, monkeypatch)


@pytest.mark.dist
@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.long)])
def test_the_blocks_of_python_run_as_they_are(whole: bool, folder: Path) -> None:
    every = [block for block in python_blocks() if not block.where.startswith("README")]
    for block in every:
        compile(block.text, block.where, "exec")
    script = write_script(folder, [block for block in every if whole or "parallelize(" not in block.text], loads=False)
    out = folder / "python.txt"
    code = warm().run([], environment(), out, folder=folder, script=str(script))
    ended: dict[str, str] = json.loads((folder / "blocks.json").read_text()) if (folder / "blocks.json").exists() else {}
    assert code == 0 and ended and not {where: error for where, error in ended.items() if error}, f"{ended}\n{out.read_text()}"
    # The page shows what is printed: a plan, with these columns.
    assert re.search(r"^stage +operators +devices +micro-batch +in flight", out.read_text(), re.M)
