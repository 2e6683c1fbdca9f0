"""Runs command lines of `run.py`, one after the other, each in a fork of a process that has imported everything already.

    python -P tests/same/server.py [--no-torch]     # the working directory and PYTHONPATH say whose run.py

Reads one JSON object a line, `{"words": [...], "log": PATH, "timeout_s": 60}`, and answers each with one:
`{"exit": 0, "cpu_s": 0.4, "wall_s": 0.5}`. The CPU seconds are those of the run and of the processes that it waited for;
start-up and imports are not in them.

The file stands alone: it also serves checkouts that do not have it. It knows `run.py` and nothing behind it.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

WARM = ("cluster=summit_1x4", "engine=simulate", "cost=analytical", "logger=none")


def run(words: list[str]) -> int:
    """Exit status of `python run.py -cd sweeps WORDS`, run in this process."""
    sys.argv = ["run.py", "-cd", "sweeps", *words]  # which has the models of published tables
    try:
        runpy.run_path("run.py", run_name="__main__")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def child(words: list[str], log: str, timeout_s: float, modules: str | None = None) -> int:
    """Fork a process for `run(words)`; returns its id. Its output goes to `log`, the names of its modules to `modules`."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setpgid(0, 0)
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(out, 1)
        os.dup2(out, 2)
        signal.signal(signal.SIGALRM, lambda *_: os.killpg(0, signal.SIGKILL))
        signal.setitimer(signal.ITIMER_REAL, timeout_s)
        code = run(words)
        if modules is not None:
            Path(modules).write_text("\n".join(sorted(sys.modules)))
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def warm_up(*, torch: bool) -> None:
    """Import here whatever a run imports, so that its forks need not.

    Args:
        torch: whether that includes what captures a model. Importing torch starts no threads, so a fork of it can compute.
    """
    with tempfile.TemporaryDirectory() as folder:
        names = Path(folder, "modules")
        # In an empty cache, so that the model is captured; a random graph needs none of that. It is small, and coarsened.
        model = ["model=mlp"] if torch else ["model=random", "model.num_ops=8", "graph.max_ops=4"]
        words = [*WARM, *model, f"cache_dir={folder}/cache", f"hydra.run.dir={folder}/run"]
        os.wait4(child(words, f"{folder}/log", 600.0, str(names)), 0)
        found = names.read_text().split("\n") if names.exists() else []
    for name in found:
        if name not in ("__main__", "__mp_main__"):
            with contextlib.suppress(BaseException):
                importlib.import_module(name)
    gc.collect()
    gc.freeze()  # so that collections in a fork neither walk nor copy what is here


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.path.insert(0, os.getcwd())
    warm_up(torch="--no-torch" not in sys.argv)
    for line in sys.stdin:
        task = json.loads(line)
        began = time.monotonic()
        _, status, used = os.wait4(child(task["words"], task["log"], task["timeout_s"]), 0)
        answer = {
            "exit": os.waitstatus_to_exitcode(status),
            "cpu_s": used.ru_utime + used.ru_stime,
            "wall_s": time.monotonic() - began,
        }
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
