"""Standard streams that break, and files that do not fit, in words and without a traceback."""

from __future__ import annotations

import errno
import io
import os
import sys
from pathlib import Path

import pytest
from rich.console import Console

from gpp.app.recording import no_room
from gpp.app.streams import steady_streams


def test_words_that_nobody_reads_end_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    os.close(read)
    stream = os.fdopen(write, "w", encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    steady_streams()
    console = Console()
    for _ in range(3):
        console.print("─► words")
        print("─► words" * 10_000, flush=True)
    stream.close()


def test_streams_that_are_closed_are_opened_on_nothing(tmp_path: Path) -> None:
    """A file that is opened later must not get their numbers, and with them what is printed."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            for number in range(3):
                os.close(number)
            sys.stdout = sys.stderr = None
            steady_streams()
            with open(tmp_path / "file", "w") as file:
                print("words", flush=True)
                os.write(1, b"more words")
                code = 0 if file.fileno() > 2 else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert (tmp_path / "file").read_text() == ""


@pytest.mark.parametrize(
    ("error", "is_disk"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), True),
        (OSError(errno.EFBIG, "File too large"), True),
        (RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)"), True),
        (OSError(errno.ENOENT, "No such file or directory"), False),
        (RuntimeError("stage 28"), False),
    ],
)
def test_a_full_disk_is_told_from_a_defect(error: Exception, is_disk: bool) -> None:
    assert no_room(error) == is_disk
