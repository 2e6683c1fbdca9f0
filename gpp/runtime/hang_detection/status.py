"""What each worker is doing, in a small mapped file: written in passing, read by whoever asks why a run stands still.

RUN_DIR/ranks/rank_N.status holds one `RankState`. A write is a store to memory (no system call), so it costs about
as much as a function call; the controller, another process of the same machine, sees it at once. No clock is read:
whoever watches sees how long nothing has changed.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
import time
from dataclasses import dataclass
from pathlib import Path
from typing import final

from gpp.files import open_binary

SILENT, STARTING, TRAINING, EVALUATION, CHECKPOINT, FINISHING, ENDED, MEETING, RESTING, COURSE = range(10)
"""Phases. A silent worker says nothing of its progress; a starting one loads and connects; a finishing one waits for
the others, and so does a meeting one, before it goes on; a resting one has been asked for nothing by its program, which
is in the same process. One in its course trains nothing: its step is the number of a repetition."""

PHASES = (
    "running",
    "loading and connecting",
    "training",
    "evaluating",
    "writing a checkpoint",
    "finishing",
    "ended",
    "meeting the others",
    "in the program between two steps",
    "repeating its program",
)

_WORDS = ("phase", "runs", "step", "index", "waiting", "beat_ns", "cpu_ns", "pid")
_PHASE, _PASSES, _STEP, _INDEX, _WAITING, _BEAT, _CPU, _PID = range(len(_WORDS))
_HOST_BYTES = 64
_RECORD = struct.Struct(f"{len(_WORDS)}q{_HOST_BYTES}s")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankState:
    """One reading of a worker's status.

    Args:
        runs: of a program, begun so far; all workers make the same ones, so two ranks' are comparable.
        step: optimizer step that the run belongs to.
        index: position in the device's list of actions; its length at the end of the run.
        waiting: whether it waits for a message or for the others of a sum.
        beat_ns: the machine's monotonic clock at the last sign of life.
        cpu_ns: processor time of all its threads at that sign of life.
    """

    phase: int = SILENT
    runs: int = 0
    step: int = 0
    index: int = 0
    waiting: bool = False
    beat_ns: int = 0
    cpu_ns: int = 0
    pid: int = 0
    host: str = ""

    @classmethod
    def decode(cls, record: bytes) -> RankState:
        """The state that `Status.encode` wrote."""
        *words, host = _RECORD.unpack(record[: _RECORD.size])
        values = dict(zip(_WORDS, words, strict=True))
        return cls(**{**values, "waiting": bool(values["waiting"])}, host=host.rstrip(b"\0").decode(errors="replace"))


class AbstractStatus:
    """The place where a worker says what it does. `at` and `waiting` are called around every action.

    Args:
        behind: is told all that a class of its own does not change; None: nobody.
    """

    def __init__(self, behind: AbstractStatus | None = None) -> None:
        self._status = behind

    def at(self, index: int) -> None:
        """Action number `index` of the present run begins; the list's length: its end."""
        if self._status:
            self._status.at(index)

    def waiting(self, waits: bool) -> None:
        """It begins, or ends, to wait for another rank."""
        if self._status:
            self._status.waiting(waits)

    def begin(self, phase: int, step: int) -> None:
        """A run of the program of `phase` (TRAINING, EVALUATION or COURSE) begins."""
        if self._status:
            self._status.begin(phase, step)

    def enter(self, phase: int) -> None:
        """It is in `phase`, which has no program."""
        if self._status:
            self._status.enter(phase)


@final
class NoStatus(AbstractStatus):
    """Nobody asks: for tests and for one process."""


@final
class Status(AbstractStatus):
    """The status of the process that calls it, in a file.

    Two objects on one file are one status: the worker's first lines make it, its main loop opens it again.

    Args:
        path: made if there is none.
    """

    def __init__(self, path: Path) -> None:
        fresh = not path.exists() or path.stat().st_size != _RECORD.size
        with open_binary(path, "wb" if fresh else "r+b") as file:
            if fresh:
                file.write(_RECORD.pack(*[0] * len(_WORDS), b""))
        with open_binary(path, "r+b") as file:
            self._map = mmap.mmap(file.fileno(), _RECORD.size)
        self._words = memoryview(self._map)[: 8 * len(_WORDS)].cast("q")
        if fresh:
            self._map[8 * len(_WORDS) :] = socket.gethostname().encode()[:_HOST_BYTES].ljust(_HOST_BYTES, b"\0")
            self._words[_PID] = os.getpid()
            self.beat()

    def at(self, index: int) -> None:
        self._words[_INDEX] = index

    def waiting(self, waits: bool) -> None:
        self._words[_WAITING] = waits

    def begin(self, phase: int, step: int) -> None:
        words = self._words
        words[_INDEX] = words[_WAITING] = 0
        words[_STEP] = step
        words[_PHASE] = phase
        words[_PASSES] += 1

    def enter(self, phase: int) -> None:
        words = self._words
        # The index stays: it says that the last run is done.
        words[_WAITING] = 0
        words[_PHASE] = phase

    def beat(self) -> None:
        """A sign of life."""
        self._words[_CPU] = time.process_time_ns()
        self._words[_BEAT] = time.monotonic_ns()

    def share(self) -> None:
        """Push the file to other machines that see the same folder."""
        self._map.flush()

    def encode(self) -> bytes:
        """The status as bytes; `RankState.decode` reads them."""
        return self._map[:]


def status_path(ranks: Path, rank: int) -> Path:
    """The file in which rank `rank` keeps its status, below RUN_DIR/ranks."""
    return ranks / f"rank_{rank}.status"


def read_state(path: Path) -> RankState | None:
    """The state in a status file; None where there is none yet."""
    try:
        record = path.read_bytes()
    except FileNotFoundError:
        return None
    return RankState.decode(record) if len(record) == _RECORD.size else None
