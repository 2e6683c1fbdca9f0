"""The process that keeps a run's problem warm, and answers each question in a process forked from it.

A question of a page ends the one that the page asked before, whatever its planner is doing: the process of that is killed. Standard
input has a line of JSON for each question (`number`, `page`, `asked`), standard output a frame for each answer: a line with its
number and its bytes, then these. Number 0 is the page of the run, or why it cannot be planned again.

    python -m gpp.ui.keeper RUN_DIR [PACKAGE ...]
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from gpp.errors import GppError, printable
from gpp.ui.bench import Bench, question, written

READ = 1 << 16
"""Bytes that are read at once."""


@dataclass(eq=False)
class _OpenQuestion:
    """A question that is being answered: its page, its number, the process, and what this has said so far."""

    page: str
    number: int
    process: int
    said: bytearray


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
    open_questions: dict[int, _OpenQuestion] = {}
    unread = b""
    with selectors.DefaultSelector() as selector:
        selector.register(requests, selectors.EVENT_READ)

        def end(source: int, *, killed: bool) -> None:
            selector.unregister(source)
            os.close(source)
            asked = open_questions.pop(source)
            if killed:
                os.kill(asked.process, signal.SIGKILL)
            os.waitpid(asked.process, 0)
            lost = written({"status": "failed", "reason": "the process that planned has died"})
            _frame(frames, asked.number, b"" if killed else bytes(asked.said) or lost)

        while True:
            for key, _ in selector.select():
                if key.fd != requests and open_questions.get(key.fd) is not key.data:
                    continue  # ended by a question that came in the same turn; another one may have its number now
                content = os.read(key.fd, READ)
                if key.fd != requests:
                    open_questions[key.fd].said.extend(content)
                    if not content:
                        end(key.fd, killed=False)
                    continue
                if not content:
                    for source in list(open_questions):
                        end(source, killed=True)
                    return
                *lines, unread = (unread + content).split(b"\n")
                for line in lines:
                    head = json.loads(line)
                    for source in [s for s, asked in open_questions.items() if asked.page == head["page"]]:
                        end(source, killed=True)
                    source, process = _forked(answer, head["asked"].encode())
                    open_questions[source] = _OpenQuestion(head["page"], head["number"], process, bytearray())
                    selector.register(source, selectors.EVENT_READ, open_questions[source])


def _forked(answer: Callable[[bytes], bytes], asked: bytes) -> tuple[int, int]:
    """Start a process that answers; where to read the answer, and the process."""
    read, write = os.pipe()
    process = os.fork()
    if process == 0:
        os.close(read)
        _answer(answer, asked, write)
    os.close(write)
    return read, process


def _answer(answer: Callable[[bytes], bytes], asked: bytes, out: int) -> NoReturn:
    code = 1
    try:
        try:
            said = answer(asked)
        except Exception as error:
            said = refusal(error)
        with open(out, "wb") as file:
            file.write(said)
        code = 0
    finally:
        os._exit(code)  # the parent's handlers are not this process's


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
