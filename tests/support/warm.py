"""`run.py` and its workers without their imports: a process that has imported everything once, and forks.

Starting Python, torch and what a capture needs costs a worker three to five seconds of computing, more than most runs
that are tested. `python -m tests.support.warm SOCKET` takes a fork of itself for each process of the tests that connects,
which reads requests and runs each in a fork of its own; the workers of that run are forks of it in turn, so they have the
same parent, folders, environment and log files as processes have.

What is about processes themselves (their start, kills, signals, command lines) is tested on real ones: `cli.start`.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NoReturn, TextIO

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 240.0
CLONE_NEWNET = 0x40000000  # <linux/sched.h>
IMPORTS = (
    "torch.distributed.elastic.multiprocessing",
    "hydra._internal.hydra",
    "hydra.core.override_parser.overrides_parser",
    "jinja2",
    "gpp.app.cli",
    "gpp.app.composing",
    "gpp.app.experiment",
    "gpp.app.judging",
    "gpp.app.measuring",
    "gpp.app.multirun",
    "gpp.app.recording",
    "gpp.app.replanning",
    "gpp.app.surveys",
    "gpp.capture.examples",
    "gpp.data.imported",
    "gpp.models.imported",
    "gpp.planners.graphpipe.graphpipe",
    "gpp.report",
    "gpp.report.sweep.figure",
    "gpp.runtime.checkpoint.final",
    "gpp.runtime.controller.controller",
    "gpp.runtime.live.crew",
    "gpp.runtime.worker.main",
)
"""What runs import when they need it, and what would cost each of them seconds here."""


class Warm:
    """The client's side: the process of all tests of a session, started by the first that asks, with which it ends."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        path = Path(os.environ["GPP_CACHE"]).parent / "warm"
        with open(path.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            found = self._connected(path)
            if found is None:
                self._start(path)
                while (found := self._connected(path)) is None:
                    assert self._process is not None and self._process.poll() is None, "the warm process does not start"
                    time.sleep(0.05)
        self._asked = found
        atexit.register(self.close)

    def _start(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        env = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "120", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "tests.support.warm", str(path)]
        self._process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, env=env)

    @staticmethod
    def _connected(path: Path) -> TextIO | None:
        """A connection to which somebody answers; none where there is no process, or one that ends just now."""
        with socket.socket(socket.AF_UNIX) as link:
            try:
                link.connect(str(path))
                asked = link.makefile("rw")
                return asked if asked.readline() else None
            except OSError:
                return None

    def close(self) -> None:
        """Nothing more is asked; who has started the process waits for its end."""
        self._asked.close()
        if self._process is not None:
            self._process.communicate()

    def run(
        self, words: list[str], env: dict[str, str], out: Path, *, folder: Path = ROOT, script: str | None = None, network: str = ""
    ) -> int:
        """Run `run.py`, or another script, with `words` to its end, its output in the file `out`; returns its exit code.

        Args:
            network: the network namespace that it runs in, by its name; empty for this one.
        """
        request = {"words": words, "env": env, "out": str(out), "folder": str(folder), "script": script or str(ROOT / "run.py")}
        request["network"] = network
        self._asked.write(json.dumps(request) + "\n")
        self._asked.flush()
        answer = self._asked.readline()
        assert answer, "the warm process is gone"
        return json.loads(answer)


@cache
def warm() -> Warm:
    """This process's own."""
    return Warm()


def _fork(run: Callable[[], object], out: str, err: str | None = None) -> int:
    """Run a function in a child as a program of its own, with its output in files; returns the child's process id."""
    sys.stdout.flush()
    sys.stderr.flush()
    if pid := os.fork():
        return pid
    code = 1
    try:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        files = [os.open(os.devnull, os.O_RDONLY)]
        files += [os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND) for path in (out, err or out)]
        for number, file in enumerate(files):
            os.dup2(file, number)
            os.close(file)
        sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", 1, closefd=False)
        try:
            run()
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
            if isinstance(end.code, str):
                print(end.code, file=sys.stderr)
        except BaseException:
            traceback.print_exc()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


@dataclass
class _Failure:
    exitcode: int


@dataclass
class _Result:
    """As `RunProcsResult` of torch."""

    failures: dict[int, _Failure]
    stderrs: dict[int, str]

    def is_failed(self) -> bool:
        return bool(self.failures)


class _Forks:
    """As `PContext` of torch: started workers."""

    def __init__(self, name: str, entrypoint: str, args: dict[int, tuple[str, ...]], envs: dict[int, dict[str, str]], logs: Any):
        files = logs.reify(envs)
        self._stderrs: dict[int, str] = files.stderrs
        self._running = {rank: self._start(args[rank], env, files.stdouts[rank], files.stderrs[rank]) for rank, env in envs.items()}
        self._pids = dict(self._running)
        self._codes: dict[int, int] = {}

    @staticmethod
    def _start(words: tuple[str, ...], env: dict[str, str], out: str, err: str) -> int:
        def work() -> None:
            os.environ.update(env)
            import torch

            if torch.version.cuda:  # such a torch refuses a backward after a fork of a process that has run one
                os.execv(sys.executable, [sys.executable, *words])
            _, module, *rest = words
            sys.argv = [module, *rest]
            with warnings.catch_warnings():
                # It is imported already, and runs once more as the main module.
                warnings.simplefilter("ignore", RuntimeWarning)
                runpy.run_module(module, run_name="__main__")

        return _fork(work, out, err)

    def pids(self) -> dict[int, int]:
        return self._pids

    def wait(self, timeout: float, period: float = 1) -> _Result | None:
        """All have ended, or one has failed, which ends the others; None after the timeout."""
        end = time.monotonic() + timeout
        while True:
            self._reap()
            failures = {rank: _Failure(code) for rank, code in self._codes.items() if code}
            if failures or not self._running:
                self.close(signal.SIGTERM, 5)
                return _Result(failures, self._stderrs)
            if time.monotonic() >= end:
                return None
            time.sleep(min(period, 0.02))

    def _reap(self) -> None:
        for rank, pid in list(self._running.items()):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                self._codes[rank] = os.waitstatus_to_exitcode(status)
                del self._running[rank]

    def close(self, number: signal.Signals, timeout: float) -> None:
        """Ask those that run to end; after the timeout, make them."""
        for attempt, limit_s in ((number, timeout), (signal.SIGKILL, 60.0)):
            for pid in self._running.values():
                os.kill(pid, attempt)
            end = time.monotonic() + limit_s
            while self._running and time.monotonic() < end:
                self._reap()
                time.sleep(0.01)


def _run(request: dict[str, Any]) -> None:
    import gpp.runtime.controller.controller as controller
    import gpp.runtime.live.crew as crew

    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["folder"])
    if request["network"]:
        with open(f"/run/netns/{request['network']}") as network:
            if ctypes.CDLL(None, use_errno=True).setns(network.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")
    # As Python does where it starts: the folder of the script, then PYTHONPATH.
    script = Path(request["script"])
    sys.path[:0] = [str(script.parent), *request["env"]["PYTHONPATH"].split(os.pathsep)]
    controller.start_processes = crew.start_processes = _Forks  # pyright: ignore[reportAttributeAccessIssue]
    sys.argv = [str(script), *request["words"]]
    runpy.run_path(str(script), run_name="__main__")


def _answer(request: dict[str, Any]) -> int:
    pid, end = _fork(lambda: _run(request), request["out"]), time.monotonic() + TIMEOUT_S
    while True:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > end:
            os.kill(pid, signal.SIGKILL)
            end = float("inf")
        time.sleep(0.01)


def _plan() -> None:
    """Run a small plan to its end: templates are compiled then and schemas of files made, a fifth of the time of a small run."""
    from hydra.core.global_hydra import GlobalHydra

    small = ["mode=plan", "model=random", "model.num_ops=4", "graph.max_ops=4", "cluster=summit_1x4", "logger=none"]
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(None), contextlib.suppress(SystemExit):
        sys.argv = ["run.py", *small, f"hydra.run.dir={folder}/run"]
        runpy.run_path(str(ROOT / "run.py"), run_name="__main__")
    GlobalHydra.instance().clear()


def _capture() -> None:
    """Trace one layer: torch's export makes tables when it is used for the first time.

    Nothing is measured, as a capture would: after a backward, torch built with CUDA refuses another one in every fork.
    """
    import torch

    from gpp.capture.trace import trace

    batch, target = {"input": torch.zeros(2, 1)}, {"target": torch.zeros(2, 1)}
    trace(torch.nn.Linear(1, 1), batch, target, torch.nn.functional.mse_loss, {}, batch=None)


def _serve(path: str) -> NoReturn:
    """Take connections until standard input ends, each with a fork that stays as long as the connection does."""
    import torch

    from tests.support.conf import option

    torch.set_num_threads(1)
    for name in IMPORTS:
        importlib.import_module(name)
    # Hydra has found its plugins then, and libyaml has read the files.
    option("model", "mlp")
    _capture()
    _plan()
    # Else every fork would look for garbage among all of it, and copy the pages.
    gc.collect()
    gc.freeze()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        while sys.stdin not in select.select([listener, sys.stdin], [], [])[0]:
            link, _ = listener.accept()
            if not os.fork():
                listener.close()
                _answer_all(link)
            link.close()
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()
    os._exit(0)


def _answer_all(link: socket.socket) -> NoReturn:
    """Answer the requests of a connection, one a line, with exit codes, until there are no more."""
    asked = link.makefile("rw")
    line = "here"
    while line:
        asked.write(f"{_answer(json.loads(line)) if line != 'here' else line}\n")
        asked.flush()
        line = asked.readline()
    os._exit(0)


if __name__ == "__main__":
    _serve(sys.argv[1])
