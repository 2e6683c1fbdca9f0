"""The standard streams of a run's controller: whatever becomes of them, the run goes on."""

from __future__ import annotations

import io
import os
import sys
from typing import IO, Any

from gpp.private import masked


class _Steady:
    """A standard stream without secrets, that swallows what it cannot write: nobody reads on, or the terminal is gone."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream, self._gone = stream, False

    def write(self, words: str) -> int:
        if not self._gone:
            try:
                return self._stream.write(masked(words))
            except (OSError, ValueError):
                self._gone = True
        return len(words)

    def flush(self) -> None:
        if not self._gone:
            try:
                self._stream.flush()
            except (OSError, ValueError):
                self._gone = True
        if self._gone:
            # What is left in the buffer goes nowhere; else Python complains about it when it ends.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def steady_streams() -> None:
    """Make this process's standard streams such that no run fails by its words: open, for any character, never broken."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # Otherwise the next file opened would take its number, and get the words of whoever prints.
            os.open(os.devnull, os.O_RDWR)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            stream = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 (it stays open)
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
        if not isinstance(stream, _Steady):
            setattr(sys, name, _Steady(stream))
