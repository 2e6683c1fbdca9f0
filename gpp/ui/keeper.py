"""The process that keeps a run's problem warm, and answers each question in a process forked from it.

A question of a page ends the one that the page asked before, whatever its planner is doing: the process of that is killed. Standard
input has a line of JSON for each question (`number`, `page`, `asked`), standard output a frame for each answer: a line with its
number and its bytes, then these. Number 0 is the page of the run, or why it cannot be planned again.

    python -m gpp.ui.keeper RUN_DIR [PACKAGE ...]
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NamedTuple

from gpp.errors import GppError, printable
from gpp.ui.bench import Bench, question, written

READ = 1 << 16
"""Bytes that are read at once."""


class _OpenQuestion(NamedTuple):
    """A question that is being answered: its page, its number, and the process."""

    page: str
    number: int
    process: BaseProcess


def refusal(error: Exception) -> bytes:
    """An error as an entry of the page."""
    if not isinstance(error, GppError):
        traceback.print_exception(error, file=sys.stderr)
    words = str(error) if isinstance(error, GppError) else f"{type(error).__name__}: {error}; this is a defect of gpp"
    return written({"status": "failed", "reason": printable(words)})


def serve(answer: Callable[[bytes], bytes], requests: int, frames: int) -> None:
    """Answer the questions of a file descriptor on another one, until the first ends.

    Args:
        answer: called in a process of its own, with the JSON of a question.
    """
    forks, unread = get_context("fork"), b""
    open_questions: dict[Connection, _OpenQuestion] = {}

    def end(source: Connection, said: bytes = b"") -> None:
        asked = open_questions.pop(source)
        source.close()
        asked.process.kill()
        asked.process.join()
        _frame(frames, asked.number, said)

    while True:
        for ready in wait([requests, *open_questions]):
            if isinstance(ready, Connection):
                if ready in open_questions:  # else a question that came in the same turn has ended it
                    end(ready, _said(ready))
                continue
            content = os.read(requests, READ)
            *lines, unread = (unread + content).split(b"\n")
            for line in lines:
                head = json.loads(line)
                for source in [source for source, asked in open_questions.items() if asked.page == head["page"]]:
                    end(source)
                source, out = forks.Pipe(duplex=False)
                process = forks.Process(target=_answer, args=(answer, head["asked"].encode(), out))
                process.start()
                out.close()
                open_questions[source] = _OpenQuestion(head["page"], head["number"], process)
            if not content:
                for source in list(open_questions):
                    end(source)
                return


def _said(source: Connection) -> bytes:
    try:
        return source.recv_bytes()
    except (EOFError, OSError):
        return written({"status": "failed", "reason": "the process that planned has died"})


def _answer(answer: Callable[[bytes], bytes], asked: bytes, out: Connection) -> None:
    try:
        said = answer(asked)
    except Exception as error:
        said = refusal(error)
    out.send_bytes(said)


def _frame(out: int, number: int, content: bytes) -> None:
    rest = memoryview(f"{number} {len(content)}\n".encode() + content)
    while rest:
        rest = rest[os.write(out, rest) :]


def main() -> None:
    """Keep the run of the command line."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the server, which ends this
    # What planners print is no frame.
    frames = os.dup(1)
    os.dup2(2, 1)
    try:
        bench = Bench.of(Path(sys.argv[1]), sys.argv[2:])
    except Exception as error:
        _frame(frames, 0, refusal(error))
        return
    _frame(frames, 0, written({"status": "ok", **bench.page()}))
    # The first search imports, and fills what is computed once for a graph: all others are forked behind it.
    bench.warm()
    serve(lambda asked: written(bench.answer(question(asked))), 0, frames)


if __name__ == "__main__":
    main()
