"""`python -m MODULE` as a fork of this process, which has imported everything: in a fork of the warm process (`call`)."""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self, TextIO
from unittest import mock


def forked(call: Callable[[], object]) -> int:
    """The number of a process that makes a call and ends, with 1 and the traceback where that raises."""
    if pid := os.fork():
        return pid
    code = 1
    try:
        call()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


class Fork:
    """In place of `subprocess.Popen`, as far as this project starts programs by it."""

    def __init__(self, words: Sequence[str], *, env: Mapping[str, str], **streams: Any) -> None:
        (_, _, module, *rest), piped = words, streams.get("stdin") == subprocess.PIPE
        (reads, answers), (asked, asks) = os.pipe(), os.pipe()

        def program() -> None:
            out = answers if piped else streams["stdout"].fileno()
            nowhere = os.open(os.devnull, os.O_RDWR)
            errors = out if streams.get("stderr") == subprocess.STDOUT else nowhere
            for number, file in enumerate((asked if piped else nowhere, out, errors)):
                os.dup2(file, number)
            for file in (reads, asks):
                os.close(file)
            sys.stdin, sys.stdout, sys.stderr = (os.fdopen(n, "w" if n else "r", closefd=False) for n in range(3))
            os.environ.clear()
            os.environ.update(env)
            sys.argv = [module, *rest]
            runpy.run_module(module, run_name="__main__", alter_sys=True)

        self.pid, self.returncode = forked(program), None
        for file in (answers, asked):
            os.close(file)
        self.stdin: TextIO = os.fdopen(asks, "w")
        self.stdout: TextIO = os.fdopen(reads)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stdin.close()
        self.stdout.close()
        self.wait()

    def poll(self, options: int = os.WNOHANG) -> int | None:
        """Its exit code, once it has ended."""
        if self.returncode is None:
            found, status = os.waitpid(self.pid, options)
            self.returncode = os.waitstatus_to_exitcode(status) if found else None
        return self.returncode

    def wait(self) -> int | None:
        """Wait for its end."""
        return self.poll(0)

    def kill(self) -> None:
        """End it."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


@contextmanager
def programs_forked() -> Iterator[None]:
    """While the context lasts programs are forks."""
    with mock.patch("subprocess.Popen", Fork):
        yield
