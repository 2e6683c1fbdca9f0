"""Runs cases in a checkout and keeps what they gave, in a form that no later checkout can misread."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from tests.same.cases import words_for

HERE = Path(__file__).resolve().parent
TIMES = ("search_s", "took_s", "planning_peak_bytes")
"""What is measured is kept nowhere below the top of a record."""


def environment(tree: Path) -> dict[str, str]:
    """Of a process in the checkout: its own packages, its own cache of captured models, one thread."""
    helpers = Path(tempfile.gettempdir()) / f"check_same_{os.getuid()}"
    helpers.mkdir(exist_ok=True)
    shutil.copy(HERE / "same_samples.py", helpers)
    one = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    cache = os.environ.get("GPP_CACHE") if tree == Path.cwd().resolve() else None
    return {
        **os.environ,
        **one,
        "PYTHONPATH": f"{tree}:{helpers}",
        "PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED", "0"),
        "GPP_CACHE": cache or f"{tempfile.gettempdir()}/gppcache-{tree.name}",
        "WANDB_MODE": "offline",
        "COLUMNS": "120",
    }


@dataclass(slots=True)
class Answering:
    """A process in a checkout that answers each line of JSON with one, until it is closed.

    Args:
        tree: the checkout.
        script: what it runs, with its words.
    """

    tree: Path
    script: tuple[str | Path, ...]
    process: subprocess.Popen[str] = field(init=False)

    def __post_init__(self) -> None:
        self.tree = self.tree.resolve()
        self.start()

    def start(self) -> None:
        """Start it, as at first."""
        command, pipe = [sys.executable, "-P", *map(str, self.script)], subprocess.PIPE
        self.process = subprocess.Popen(command, cwd=self.tree, env=environment(self.tree), text=True, stdin=pipe, stdout=pipe)

    def ask(self, task: dict[str, Any]) -> dict[str, Any] | None:
        """Its answer; None where it has ended."""
        assert self.process.stdin is not None and self.process.stdout is not None
        print(json.dumps(task), file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        return json.loads(line) if line else None

    def close(self) -> None:
        with suppress(BrokenPipeError):
            self.process.communicate()  # closes both pipes, which ends it


def server(tree: Path, *, torch: bool = True) -> Answering:
    """One that has imported a checkout and runs command lines in forks of itself.

    Args:
        torch: whether it has imported torch, which its runs need where they capture a model.
    """
    return Answering(tree, (HERE / "server.py", *([] if torch else ["--no-torch"])))


def answers(
    todo: Sequence[Any], start: Callable[[], Answering], ask: Callable[[Answering, Any], dict[str, Any]], jobs: int
) -> Iterator[dict[str, Any]]:
    """What processes that are started for it answer, as the answers come; `jobs` are asked at a time."""
    free: SimpleQueue[Answering] = SimpleQueue()
    started = [start() for _ in range(min(max(1, jobs), len(todo)))]
    for process in started:
        free.put(process)

    def answer(question: Any) -> dict[str, Any]:
        process = free.get()
        try:
            return ask(process, question)
        finally:
            free.put(process)

    with ThreadPoolExecutor(max(1, len(started))) as pool:
        for found in as_completed([pool.submit(answer, question) for question in todo]):
            yield found.result()
    for process in started:
        process.close()


def taken(served: Answering, case: str, programs: Path | None = None) -> dict[str, Any]:
    """Runs a case; its record.

    Args:
        programs: the folder for the texts of programs; None keeps their hashes only.
    """
    with tempfile.TemporaryDirectory(prefix="same_") as folder:
        out = Path(folder, "run")
        words = words_for(case)
        task = {"words": [*words, f"hydra.run.dir={out}"], "log": f"{folder}/log", "timeout_s": 1800.0}
        answer = served.ask(task)
        assert answer is not None
        log = Path(folder, "log").read_text(errors="replace")
        return {"case": case, **answer, **_read(out, log, programs)}


def _read(out: Path, log: str, programs: Path | None) -> dict[str, Any]:
    """What a run directory says."""
    if not (out / "result.json").exists():
        return {"status": None, "reason": log[-2000:]}
    result = json.loads((out / "result.json").read_text())
    plan = result["plan"] or {}
    record: dict[str, Any] = {
        "status": result["status"],
        "reason": result["reason"] if result["status"] != "failed" else f"{result['reason']} {log[-1000:]}",
        "search_s": plan.get("search_s"),
        "result": {key: value for key, value in plan.items() if key not in TIMES},
        "predicted": result["predicted"],
        "loss": result["loss"],
        "final_metric": result["final_metric"],
    }
    for key in ("loss_terms", "versions", "compared"):
        if key in result:
            record[key] = _without_times(result[key])
    if "emulation" in result:
        record["emulation"] = {"virtual_iteration_s": result["emulation"]["virtual_iteration_s"]}
    if (out / "answers.safetensors").exists():
        record["answers"] = hashlib.sha256((out / "answers.safetensors").read_bytes()).hexdigest()
    if (out / "job" / "plan.json").exists():
        record["plan"] = _plan(json.loads((out / "job" / "plan.json").read_text()))
    if (out / "job" / "program.txt").exists():
        text = (out / "job" / "program.txt").read_text()
        record["program"] = hashlib.sha256(text.encode()).hexdigest()[:24]
        record["program_length"] = len(text)
        if programs is not None:
            programs.mkdir(parents=True, exist_ok=True)
            (programs / f"{record['program']}.txt").write_text(text)
    return record


def _plan(plan: dict[str, Any]) -> dict[str, Any]:
    """The stages by number, and the sorted edges."""
    return {
        "stages": {str(i): dict(_unnested(stage)) for i, stage in enumerate(plan["stages"])},
        "edges": sorted(plan["edges"]),
        "minibatch_size": plan["minibatch_size"],
    }


def _unnested(stage: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The fields of a stage, and in place of one that groups several those several."""
    for key, value in stage.items():
        yield from _unnested(value) if isinstance(value, dict) else [(key, value)]


def _without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_times(inner) for key, inner in value.items() if key not in TIMES}
    return [_without_times(inner) for inner in value] if isinstance(value, list) else value


def record(
    cases: Iterable[str], tree: Path, out: Path, *, jobs: int = 1, resume: bool = False, say: Callable[[str], None] = print
) -> dict[str, dict[str, Any]]:
    """Runs the cases in the checkout and writes OUT/cases.jsonl and OUT/programs; the records by case.

    Args:
        jobs: how many run at a time.
        resume: go on with a record that was interrupted; its cases are not run again, but for those that were killed.
    """
    out.mkdir(parents=True, exist_ok=True)
    records = load(out) if resume and (out / "cases.jsonl").exists() else {}
    records = {case: found for case, found in records.items() if found["exit"] >= 0}
    todo = [case for case in dict.fromkeys(cases) if case not in records]
    total = len(todo) + len(records)
    with (out / "cases.jsonl").open("a" if resume else "w") as lines:
        for found in answers(todo, lambda: server(tree), lambda served, case: taken(served, case, out / "programs"), jobs):
            records[found["case"]] = found
            print(json.dumps(found), file=lines, flush=True)
            spent = f"{found['wall_s']:5.1f} s, CPU {found['cpu_s']:5.1f} s"
            say(f"{len(records):>3}/{total} {found['status']} {spent}  {found['case']}")
    return records


def load(folder: Path) -> dict[str, dict[str, Any]]:
    """The records of a folder, by case."""
    lines = (folder / "cases.jsonl").read_text().splitlines()
    return {found["case"]: found for found in map(json.loads, lines)}
