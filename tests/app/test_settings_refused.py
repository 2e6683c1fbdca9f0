"""Every wrong setting of the table in tests/support/wrong_settings.py is refused with field, value, rule and fix."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from run import story
from tests.support.cli import ROOT, run
from tests.support.one_process import answered
from tests.support.wrong_settings import CASES, Wrong, complaints, write


@pytest.fixture(scope="module")
def strays(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The user's wrong files, importable, in one folder for all."""
    folder = tmp_path_factory.mktemp("settings")
    write(folder)
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))


TRIED = (
    "model.factory=a.b",
    "output_dir=X",
    "hydra.runtime.output_dir=X",
    "model=random",
    "model=random mode=plan",
    "MINE strategy/schedule=holds_nothing mode=plan",
)
"""What newcomers have written."""
IDLE = ("strategies=[even,graphpipe]", "mode=inference strategy.edges.clip=true", "mode=inference engine.arrivals=poisson")
"""Words that say nothing without another one: they were ignored."""
SHORT = {
    *(*TRIED, *IDLE),
    *[case.words for case in CASES if case.kind][::16],
    *[case.words for case in CASES if not case.kind][::192],
}


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=() if case.words in SHORT else pytest.mark.long, id=case.words[:60]) for case in CASES],
)
def test_a_wrong_setting_is_refused(case: Wrong, strays: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = "sweep" if {"-m", "-cn"} & set(case.words.split()) else "run"
    code, out = answered([*case.listed(strays), f"hydra.{kind}.dir={tmp_path}"], story, monkeypatch)
    assert not complaints(case, code, out), out


def test_there_are_150_of_them() -> None:
    assert len(CASES) >= 150
    assert len({case.words for case in CASES}) == len(CASES)


@pytest.mark.parametrize("case", [case for case in CASES if "exits" in case.words or case.words == "modle=mmt"][:2], ids=str)
def test_a_process_of_its_own_answers_alike(case: Wrong, strays: Path, tmp_path: Path) -> None:
    done = run(tmp_path, *case.listed(strays), PYTHONPATH=f"{ROOT}:{strays}")
    assert not complaints(case, done.code, done.out), done.out
