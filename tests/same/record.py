"""Runs cases in a checkout and keeps what they gave, in a form that no later checkout can misread."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, Queue
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
class Server:
    """A process that has imported a checkout and runs command lines in forks of itself.

    Args:
        tree: the checkout.
        torch: whether it has imported torch, which its runs need where they capture a model.
    """

    tree: Path
    torch: bool = True
    process: subprocess.Popen[str] = field(init=False)

    def __post_init__(self) -> None:
        self.tree = self.tree.resolve()
        command = [sys.executable, "-P", str(HERE / "server.py"), *([] if self.torch else ["--no-torch"])]
        self.process = subprocess.Popen(
            command, cwd=self.tree, env=environment(self.tree), text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def run(self, words: Iterable[str], log: Path, timeout_s: float = 1800.0) -> dict[str, float]:
        """`exit`, `cpu_s` and `wall_s` of `python run.py WORDS`; what it prints goes to `log`."""
        task = {"words": list(words), "log": str(log), "timeout_s": timeout_s}
        assert self.process.stdin is not None and self.process.stdout is not None
        print(json.dumps(task), file=self.process.stdin, flush=True)
        return json.loads(self.process.stdout.readline())

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.communicate()  # closes both pipes, which ends it


def taken(server: Server, case: str, programs: Path | None = None) -> dict[str, Any]:
    """Runs a case; its record.

    Args:
        programs: the folder for the texts of programs; None keeps their hashes only.
    """
    with tempfile.TemporaryDirectory(prefix="same_") as folder:
        out = Path(folder, "run")
        words = words_for(case)
        answer = server.run([*words, f"hydra.run.dir={out}"], Path(folder, "log"))
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
    todo: Queue[str] = Queue()
    for case in cases:
        if case not in records:
            todo.put(case)
    total, lock = todo.qsize() + len(records), threading.Lock()

    def work() -> None:
        server = Server(tree)
        try:
            while True:
                case = todo.get_nowait()
                found = taken(server, case, out / "programs")
                with lock:
                    records[case] = found
                    print(json.dumps(found), file=lines, flush=True)
                    say(
                        f"{len(records):>3}/{total} {found['status']} {found['wall_s']:5.1f} s, CPU {found['cpu_s']:5.1f} s  {case}"
                    )
        except Empty:
            return
        finally:
            server.close()

    with (out / "cases.jsonl").open("a" if resume else "w") as lines:
        workers = [threading.Thread(target=work) for _ in range(max(1, min(jobs, total)))]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    return records


def load(folder: Path) -> dict[str, dict[str, Any]]:
    """The records of a folder, by case."""
    lines = (folder / "cases.jsonl").read_text().splitlines()
    return {found["case"]: found for found in map(json.loads, lines)}
