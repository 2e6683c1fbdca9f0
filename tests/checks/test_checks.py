"""`python -m tests.checks`: the list of all checks, what it says of those that ran, and a small sample of those of planners."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sweeps.headlines import HEADLINES
from tests.checks.__main__ import FULL, purpose, run
from tests.checks.planners import check, oracle
from tests.checks.runtime import Program
from tests.checks.torch_runtime import losses_of


def test_every_module_of_the_folder_is_run_and_says_what_it_is() -> None:
    """Or `make figures` runs it, for it measures and cannot fail."""
    modules = {path.stem for path in Path(__file__).parent.glob("*.py") if not path.stem.startswith(("__", "test_"))}
    measured = {name for headline in HEADLINES for name in re.findall(r"tests\.checks\.(\w+)", " ".join(headline.commands))}
    assert modules == set(FULL) | measured
    for name, script in FULL.items():
        assert purpose(name)
        assert set(re.findall(r"tests\.checks\.(\w+)", script)) == {name}


def test_losses_of_two_ranks_are_parts_of_one(tmp_path: Path) -> None:
    """A rank without a loss says none, and the last line of a log may be half written."""
    logs = [tmp_path / "0", tmp_path / "1"]
    logs[0].write_text('{"step": 0, "end": 1.0}\n{"step": 1, "end": 2.0, "loss": 0.5}\n{"st')
    logs[1].write_text('{"step": 0, "end": 1.0, "loss": 3.0}\n{"step": 1, "end": 2.0, "loss": 1.5}\n')
    assert losses_of(Program([], logs)) == [3.0, 2.0]


def test_all_run_and_one_that_fails_is_the_exit_code(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    scripts = {"kills": "false\ntrue", "serving": f"python -c 'import tests' && cp -r $DIR {tmp_path}/copy"}
    assert run(scripts) == 1
    rows = capfd.readouterr().out.splitlines()[-3:]
    assert [row.split()[0] for row in rows[:2]] == ["kills", "serving"]
    assert [row.split()[-1] for row in rows[:2]] == ["failed", "ok"] and rows[2] == "2 checks, 1 failed"
    assert not [*(tmp_path / "copy").iterdir()]
    assert run({"serving": "true"}) == 0


@pytest.mark.parametrize(
    ("what", "count"),
    [
        pytest.param("validate", 1, marks=pytest.mark.long),
        ("oracle", 5),
        ("dags", 1),
    ],
)
def test_sample(what, count):
    violations, summary = check(what, count)
    assert not violations, "\n".join([*violations, summary])


def test_the_only_plan_that_fits_is_found() -> None:
    """No layout comes to it in a short walk: 5 stages of 8 operators on 5 devices, 1 % below their memory."""
    assert not oracle(56).violations
