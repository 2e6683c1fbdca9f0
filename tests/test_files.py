"""Files that are wrong: every one is refused in one message that names it, or is as good as none."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from gpp import NoFlush, OneFOneB, Plan, Stash, Strategy
from gpp.errors import GppError, InvalidConfig, InvalidFile, InvalidPlan
from gpp.formats.profiles import read_profile
from gpp.program.program import Program
from gpp.runtime.job import Job
from gpp.serialization import check_sealable, from_json, read_json, read_text, seal, to_json, unseal
from tests.checks import fuzz
from tests.fuzz.formats import CHAINED, FORMATS, SLOW, STREAMING, small_problem
from tests.support.pages import ROOT

READERS: dict[str, Callable[[Path], object]] = {
    "plan": lambda path: read_json(Plan, path),
    "profile": read_profile,
    "text": read_text,
}


@pytest.mark.parametrize("name", [name for name in FORMATS if name not in SLOW])
def test_damaged_files_are_refused_by_name_or_work(name: str) -> None:
    """A sample of `python -m tests.checks.fuzz`."""
    out = fuzz.check_many(name, seed=11, numbers=range(12))
    assert not out.violations and out.refused > 2
    assert out.accepted + out.refused == 12


@pytest.mark.long
def test_the_check_needs_no_session_of_tests() -> None:
    """Formats that whole runs read are tried by it alone: without the suite's cache each of their cases once ended in KeyError."""
    env = {name: value for name, value in os.environ.items() if name != "GPP_CACHE"}
    words = [sys.executable, "-m", "tests.checks.fuzz", "--count", str(len(SLOW)), *(f"--format={name}" for name in SLOW)]
    done = subprocess.run(words, cwd=ROOT, env={**env, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == 0 and "\n0 wrong" in done.stdout, done.stdout + done.stderr


def plan_text(**changes: str) -> str:
    text = to_json(CHAINED.plan(small_problem()))
    for old, new in changes.items():
        assert f'"{old}": ' in text
        text = re.sub(rf'"{old}": ("[^"]*"|[^,\n]+)', lambda match, old=old, new=new: f'"{old}": {new}', text, count=1)
    return text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (lambda: "", ":1:1: is no JSON"),
        (lambda: "\0", ":1:1: is no JSON"),
        (lambda: "[]", ": must be an object"),
        (lambda: "null", ": must be an object"),
        (lambda: plan_text()[:-5], ": is no JSON"),
        (lambda: plan_text(k="true"), r"stages\[0\].k=true: must be an integer"),
        (lambda: plan_text(k='"1"'), r"stages\[0\].k='1': must be an integer"),
        (lambda: plan_text(k="1.0"), r"stages\[0\].k=1.0: must be an integer"),
        (lambda: plan_text(k="9" * 400), r"stages\[0\].k=\(an integer of about 400 digits\)"),
        (lambda: plan_text(k="9" * 5000), r":\d+:\d+: has 5000 digits"),
        (lambda: plan_text(k='1, "k": 1'), r":\d+:\d+: is given twice: \"k\""),
        (lambda: plan_text(k="[" * 5000), r":\d+:\d+: is nested more than 100 levels"),
        (lambda: plan_text(k="[" * 150 + "]" * 150), r"stages\[0\].k"),
        (lambda: plan_text(search_s="NaN"), r":\d+:\d+: must be a finite number, not NaN"),
        (lambda: plan_text(search_s="-Infinity"), r":\d+:\d+: must be a finite number, not -Infinity"),
        (lambda: plan_text(search_s="1e999"), "search_s=inf: must be a finite number"),
        (lambda: plan_text(planner='"\\ud800"'), r":\d+:\d+: is no JSON"),
        (lambda: plan_text(planner='"x", "wieghts": 3'), "wieghts: is no field"),
        (lambda: plan_text(minibatch_size="null"), "minibatch_size=null: must be an integer"),
        (lambda: plan_text().replace('"edges"', '"edgse"'), "edges: is missing"),
    ],
)
def test_what_is_wrong_in_a_plan_is_said_with_its_place(tmp_path: Path, text: Callable[[], str], message: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text())
    with pytest.raises(InvalidFile, match=rf"^plan=.*plan\.json.*{message}") as caught:
        read_json(Plan, path, setting="plan")
    assert str(caught.value).count("Fix:") == 1 and "\n" not in str(caught.value)


NO_FILES = ("directory", "pipe", "loop", "dangling", "missing", "nul", "long", "surrogate", "huge", "latin", "device")


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("kind", NO_FILES)
def test_what_is_no_file_is_refused_at_once(tmp_path: Path, reader: str, kind: str) -> None:
    path = tmp_path / "file"
    match kind:
        case "directory":
            path.mkdir()
        case "pipe":
            os.mkfifo(path)
        case "loop":
            path.symlink_to(tmp_path / "other")
            (tmp_path / "other").symlink_to(path)
        case "dangling":
            path.symlink_to(tmp_path / "nothing")
        case "nul":
            path = tmp_path / "a\0b"
        case "long":
            path = tmp_path / ("x" * 5000)
        case "surrogate":
            path = tmp_path / "\ud812"
        case "huge":
            with open(path, "wb") as file:
                file.truncate(10**12)
        case "latin":
            path.write_bytes("naïve".encode("latin-1"))
        case "device":
            path = Path("/dev/zero")
    start = time.process_time()
    with pytest.raises(InvalidFile, match=r"Fix:") as caught:
        READERS[reader](path)
    assert time.process_time() - start < 2 and len(str(caught.value)) < 2000
    assert str(caught.value).isprintable()


def test_a_link_to_a_file_and_a_byte_order_mark_are_no_damage(tmp_path: Path) -> None:
    text = plan_text()
    (tmp_path / "real.json").write_text("\ufeff" + text, encoding="utf-8")
    (tmp_path / "plan.json").symlink_to(tmp_path / "real.json")
    assert read_json(Plan, tmp_path / "plan.json") == from_json(Plan, text)


def test_a_seal_tells_a_value_from_a_damaged_one_and_from_another(tmp_path: Path) -> None:
    plan, path = from_json(Plan, plan_text()), tmp_path / "key.json"
    seal(path, plan, "cache_dir")
    assert unseal(Plan, path) == plan
    assert unseal(Plan, path.rename(tmp_path / "another.json")) is None
    seal(path, plan, "cache_dir")
    whole = path.read_text()
    path.write_text(whole.replace('"microbatch_size": ', '"microbatch_size": 1'))
    assert unseal(Plan, path) is None
    path.unlink()
    os.mkfifo(path)
    assert unseal(Plan, path) is None
    seal(path, plan, "cache_dir")
    assert unseal(Plan, path) == plan


def test_a_folder_that_cannot_be_written_to_is_refused_before_the_work(tmp_path: Path) -> None:
    check_sealable(tmp_path / "new" / "key.json", "cache_dir")
    assert list((tmp_path / "new").iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(InvalidConfig, match=r"cache_dir=.*file.*cannot be written to: .*Fix: set cache_dir=FOLDER"):
        check_sealable(tmp_path / "file" / "key.json", "cache_dir")


@pytest.mark.parametrize("k", [0, -1])
def test_a_plan_whose_k_is_below_one_ends(k: int) -> None:
    """`k` 0 went on for ever: the schedule never came further."""
    problem = small_problem()
    text = to_json(CHAINED.plan(problem)).replace('"k": 1', f'"k": {k}')
    with pytest.raises(InvalidFile, match=f"k={k}: must be at least 1"):
        from_json(Plan, text)
    plan = CHAINED.plan(problem)
    bad = replace(plan, stages=tuple(replace(stage, k=k) for stage in plan.stages))
    with pytest.raises(InvalidPlan, match="k="):
        Strategy(name="x", planner=CHAINED.planner, schedule=OneFOneB()).check(bad, problem)


def test_a_plan_with_endlessly_many_samples_in_flight_is_refused() -> None:
    """The program of a pipeline that does not drain grows with them: 10^12 would fill any memory."""
    problem = small_problem()
    plan = STREAMING.plan(problem)
    first = plan.stages[0]
    bad = replace(plan, stages=(replace(first, in_flight=first.microbatch_size * 10**6), *plan.stages[1:]))
    with pytest.raises(GppError, match=r"in flight|bytes on a device"):
        Strategy(name="x", planner=STREAMING.planner, schedule=NoFlush(), weights=Stash()).check(bad, problem)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", 1),
        ("samples 8 minibatches ²\ns0.F0@d0\n", 1),
        ("samples 8 minibatches 1\n", 2),
        ("samples 8 minibatches 1\ns0.F0@d0 s0.F1@d1\n", 2),
        ("samples 8 minibatches 1\ns0.F0@d0\ns0.B0@d0\n", 3),
        ("samples 8 minibatches 1\ns0.F0@d0\nidle@d0\n", 3),
        ("samples 8 minibatches 1\nidle@dx\n", 2),
        ("samples 8 minibatches 1\nidle@d-1\n", 2),
        ("samples 8 minibatches 1\ns0.F٣@d0\n", 2),
        ("samples 8 minibatches 1\ns" + "1" * 5000 + ".F0@d0\n", 2),
    ],
)
def test_a_program_that_cannot_be_read_names_the_line(text: str, line: int) -> None:
    with pytest.raises(GppError, match=f"line {line}: ") as caught:
        Program.from_text(text)
    assert len(str(caught.value)) < 400


def test_a_job_is_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "job").mkdir()
    os.mkfifo(tmp_path / "job" / "settings.json")
    found: list[BaseException] = []

    def load() -> None:
        try:
            Job.load(tmp_path)
        except GppError as error:
            found.append(error)

    thread = threading.Thread(target=load, daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive() and "a pipe" in str(found[0])
