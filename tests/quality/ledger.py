"""The ledger: every problem with every planner, of one checkout or of two by turns."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.quality.problems import ON_DEMAND, PLANNERS, Question
from tests.same.cases import words_for
from tests.same.record import Answering, answers

Row = dict[str, Any]
"""What the driver has answered, with `problem`, `planner` and `words`."""

Say = Callable[[str], None]


def driver(tree: Path) -> Answering:
    """A process that plans with a checkout's planners, problem after problem (`driver.py`)."""
    return Answering(tree, (Path(__file__).with_name("driver.py"),))


def asked(planning: Answering, question: Question, planner: str) -> Row:
    """What a planner makes of a problem."""
    chosen = {**PLANNERS, **ON_DEMAND}[planner]
    found = planning.ask({"problem": words_for(question.words), "planner": words_for(chosen)})
    if found is None:
        found = {"status": "failed", "reason": f"the driver ended with {planning.process.wait()}"}
        planning.start()
    return {"problem": question.name, "planner": planner, "words": f"{question.words} {chosen}", **found}


def load(file: Path) -> list[Row]:
    """The rows of a record."""
    return [json.loads(line) for line in file.read_text().splitlines()]


def record(
    tree: Path, out: Path, questions: Sequence[Question], planners: Sequence[str], *, jobs: int = 1, say: Say = print
) -> list[Row]:
    """Asks every planner of a checkout every problem and adds the answers to a file of JSON lines; those there are not asked again.

    Args:
        jobs: how many problems are planned at a time, each in a process of its own.
    """
    commit, rows = _commit(tree), load(out) if out.exists() else []
    if other := {row["commit"] for row in rows} - {commit}:
        raise ValueError(f"{out} holds answers of {', '.join(sorted(other))}, and {tree} is at {commit}: give another file")
    known = {row["words"] for row in rows}
    words = {**PLANNERS, **ON_DEMAND}
    todo = [(question, planner) for planner in planners for question in questions]
    todo = [(question, planner) for question, planner in todo if f"{question.words} {words[planner]}" not in known]
    total = len(todo) + len(rows)
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("a") as lines:
        for found in answers(todo, lambda: driver(tree), lambda planning, each: asked(planning, *each), jobs):
            rows.append({"commit": commit, **found})
            print(json.dumps(rows[-1]), file=lines, flush=True)
            say(f"{len(rows):>4}/{total} {line(rows[-1])}")
    return rows


def line(row: Row) -> str:
    """An answer in a line."""
    said = f"{row['step_s']:.6g} s a step, {row['cpu_s']:.2f} CPU s" if row["status"] == "ok" else row["status"]
    return f"{row['planner']:<16} {row['problem']:<24} {said}"


def by_turns(
    before: Path, after: Path, questions: Sequence[Question], planners: Sequence[str], *, say: Say = print
) -> Iterator[tuple[Row, Row]]:
    """The answers of two checkouts: two processes, of which one waits while the other plans, each first as often as the other."""
    drivers = driver(before), driver(after)
    try:
        for turn, (question, planner) in enumerate((q, p) for q in questions for p in planners):
            first = turn % 2
            answers = {side: asked(drivers[side], question, planner) for side in (first, 1 - first)}
            say(f"before {line(answers[0])}; after {line(answers[1]).split(maxsplit=1)[1]}")
            yield answers[0], answers[1]
    finally:
        for each in drivers:
            each.close()


@contextmanager
def checkout(which: str) -> Iterator[Path]:
    """The folder of a checkout that is given by its path or by a commit, of which a work tree is made for the time."""
    if Path(which).is_dir():
        yield Path(which).resolve()
        return
    commit = _git("rev-parse", "--verify", f"{which}^{{commit}}")
    with tempfile.TemporaryDirectory(prefix="quality_") as folder:
        tree = Path(folder, f"quality-{commit[:12]}")  # which names the cache of captured models, too
        _git("worktree", "add", "--detach", str(tree), commit)
        try:
            yield tree
        finally:
            _git("worktree", "remove", "--force", str(tree))


def _commit(tree: Path) -> str:
    """The commit of a checkout, and whether files of it have changed."""
    return _git("-C", str(tree), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*")


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], check=True, capture_output=True, text=True).stdout.strip()
