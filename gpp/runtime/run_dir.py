"""A run directory has one run at a time, says whose files it holds, and keeps what earlier runs left.

RUN_DIR/.lock        `RunIdentity` of the run under way, under a lock that ends with its process; a killed run leaves the file
        run.json     `RunIdentity` whose files are here
        earlier/N/   the files of an earlier run, a run directory like any other
"""

from __future__ import annotations

import errno
import fcntl
import os
import shlex
import socket
import sys
import uuid
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Self, final

from gpp.errors import InvalidConfig, InvalidFile
from gpp.files import close_to_others, descriptor, drop_unfinished, folder, write_text
from gpp.private import masked_json
from gpp.serialization import read_json, to_json

RUN_DIR = "hydra.run.dir"
"""The setting that names a run directory on the command line."""

LOCK, RUN, EARLIER = ".lock", "run.json", "earlier"
CHECKPOINTS = "checkpoints"
FINAL = "final"
"""Folder of the last weights, below that of the checkpoints."""

ANSWERS = "answers.safetensors"
ANSWERS_UNDER_WAY = f".{ANSWERS}"

ENDS = ("explanation.json", "trace.json", "timeline.json", "report.html", "result.json")
"""Files that tell how a run ended."""

CONTENTS = (
    CHECKPOINTS,
    "metrics.jsonl",
    ANSWERS_UNDER_WAY,
    ANSWERS,
    "ranks",
    "replaced",
    "plans",
    "pipeedge",
    "slurm",
    "forms",
    "confirmed",
    "run.log",
    *ENDS,
    "config.yaml",
    "job",
    RUN,
)
"""All files of a run, in the order in which they are set aside: the identity goes last, so that the rest is never without it."""

NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)
"""Errors of file systems that know no locks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunIdentity:
    """Identity of a run.

    Args:
        id: a name of its own; a run that goes on from its own directory's checkpoints keeps it.
        started: local date and time.
        resume: folder of the checkpoint that it went on from.
    """

    id: str
    started: str
    command: str
    pid: int
    host: str
    resume: str | None = None


def run_of(path: Path) -> RunIdentity | None:
    """The run whose files a directory holds; None where it does not say."""
    return _read(path / RUN)


def holds(run_dir: Path, run_id: str, sizes: Mapping[str, int]) -> bool:
    """Whether a folder is that of a run, and has its files whole.

    Args:
        sizes: bytes of each file, by its path in the folder.
    """
    run = run_of(run_dir)
    if run is None or run.id != run_id:
        return False
    return all((run_dir / name).is_file() and (run_dir / name).stat().st_size == size for name, size in sizes.items())


def under_way(path: Path) -> RunIdentity | None:
    """The run that is under way in a directory, or that was killed there; None if the last one came to its end."""
    return _read(path / LOCK)


def is_locked(path: Path) -> bool:
    """Whether a run is under way in a directory."""
    try:
        handle = os.open(path / LOCK, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in NO_LOCKS
    else:
        return False
    finally:
        os.close(handle)


def steps_in(run_dir: Path) -> list[tuple[int, Path]]:
    """(step, folder) of every finished checkpoint of a run, in no order."""
    found = (run_dir / CHECKPOINTS).glob("step_*")
    return [(int(path.name[5:]), path) for path in found if path.name[5:].isdigit() and path.is_dir()]


@final
class RunDir:
    """One run's hold on its directory, from `claim` to `release`; as a context manager it is released at the end.

    Nothing that an earlier run left is touched before `begin`.

    Args:
        field: the setting that names the directory, for errors.
        command: the command line, for whoever finds the directory in use.
    """

    def __init__(self, path: Path, *, field: str = RUN_DIR, command: str | None = None) -> None:
        self.path, self.field = path, field
        self.command = shlex.join(sys.argv) if command is None else command
        self.run: RunIdentity | None = None
        self.begun = False
        self._handle: int | None = None
        self._made: list[Path] = []
        self._left = b""
        self._step: int | None = None

    @property
    def claimed(self) -> bool:
        return self.run is not None

    def claim(self, resume: Path | None = None, step: int = 0) -> None:
        """Make the directory if there is none, and keep other runs out of it.

        Args:
            resume: folder of the checkpoint that the run goes on from; a run that is killed from now on hands it on.
            step: steps that this checkpoint has done.

        Raises:
            InvalidConfig: another run is under way there, or the directory cannot be written.
        """
        if self.claimed:
            return
        try:
            str(self.path).encode()
            self._made = [folder for folder in (self.path, *self.path.parents) if not os.path.lexists(folder)]
            folder(self.path)
            self._handle = self._lock()
        except (OSError, ValueError) as error:
            self._remove()
            raise self._unwritable(error) from error
        here = resume is not None and resume.parent.parent.resolve() == self.path.resolve()
        self._step = step if here else None
        before = run_of(self.path) if here else None
        run = RunIdentity(
            id=before.id if before else uuid.uuid4().hex,
            started=datetime.now().astimezone().isoformat(" ", "seconds"),
            command=self.command,
            pid=os.getpid(),
            host=socket.gethostname(),
            resume=None if resume is None else str(resume.resolve()),
        )
        try:
            self._left = os.pread(self._handle, 1 << 16, 0)
            _write(self._handle, masked_json(to_json(run)).encode())
        except OSError as error:
            self.release()
            raise self._unwritable(error) from error
        self.run = run

    def begin(self, *, joins: bool = False) -> None:
        """Take the directory over: set aside what this run does not go on with, and say whose files are here.

        Args:
            joins: whether the run goes on with the files that another command left, as one that collects results does.
        """
        assert self.run is not None, "a directory is claimed first"
        if self.begun:
            return
        self.begun = True
        if joins and (before := run_of(self.path)):
            self.run = before
        elif not joins:
            self._set_aside(self._others())
        drop_unfinished(self.path)
        for name in CONTENTS:
            close_to_others(self.path / name)  # of a run by an earlier version, which this one goes on with
        write_text(self.path / RUN, to_json(self.run))

    def release(self) -> None:
        """Let other runs in; a run that did not begin leaves the directory as it was."""
        handle, self._handle, self.run = self._handle, None, None
        if handle is None:
            return
        # The next run, which may hold the file open already, notices that it has lost its name.
        with suppress(OSError):
            if self.begun or not self._left:
                (self.path / LOCK).unlink()
            else:
                _write(handle, self._left)
        os.close(handle)
        if not self.begun:
            self._remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _remove(self) -> None:
        """Remove the folders that this run made, as far as they are empty."""
        with suppress(OSError, ValueError):
            for folder in self._made:
                folder.rmdir()
        self._made = []

    def _lock(self) -> int:
        file = self.path / LOCK
        while True:
            handle = descriptor(file, os.O_RDWR)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(handle)
                run = under_way(self.path)
                who = f"process {run.pid} on {run.host} since {run.started} ({run.command})" if run else "another process"
                fix = f"wait for its end, end it{f' (kill {run.pid})' if run else ''}, or name another directory"
                raise InvalidConfig(self.field, self.path, f"is in use by {who}", fix) from None
            except OSError as error:
                if error.errno not in NO_LOCKS:
                    os.close(handle)
                    raise
            # A run that ends removes the file, perhaps between our two calls.
            with suppress(FileNotFoundError):
                if os.stat(file).st_ino == os.fstat(handle).st_ino:
                    return handle
            os.close(handle)

    def _unwritable(self, error: Exception) -> InvalidConfig:
        if isinstance(error, InvalidConfig):
            return error
        fix = f"name a directory that can be written, as in {self.field}=outputs/mine"
        if isinstance(error, UnicodeError):
            rule = f"has characters that the locale's encoding, {sys.getfilesystemencoding()}, does not know"
            return InvalidConfig(self.field, ascii(str(self.path)), rule, "set PYTHONUTF8=1, or use other characters")
        if not isinstance(error, OSError):  # a NUL in it
            return InvalidConfig(self.field, self.path, f"is no path ({error})", fix)
        blocks = [path for path in (self.path, *self.path.parents) if os.path.lexists(path) and not os.path.isdir(path)]
        if not blocks:
            rule = f"cannot be written ({error.strerror})"
        elif blocks[0].is_symlink():
            rule = f"{blocks[0]} leads to {os.readlink(blocks[0])}, which is not there"
        else:
            rule = f"{blocks[0]} is a file, not a directory"
        return InvalidConfig(self.field, self.path, rule, fix)

    def _others(self) -> list[str]:
        """Files that this run does not go on with."""
        if self._step is None:
            return list(CONTENTS) if any((self.path / name).exists() for name in (RUN, "result.json", "job/settings.json")) else []
        later = [f"{CHECKPOINTS}/{folder.name}" for step, folder in steps_in(self.path) if step > self._step]
        # What a run left that was killed says nothing more; a result is a result, though its run goes on.
        return [*later, *([f"{CHECKPOINTS}/{FINAL}", *ENDS] if _is_ok(self.path) else [])]

    def _set_aside(self, names: Iterable[str]) -> None:
        found = [name for name in names if os.path.lexists(self.path / name)]
        if not found:
            return
        earlier = folder(self.path / EARLIER)
        number = max((int(path.name) for path in earlier.iterdir() if path.name.isdigit()), default=0) + 1
        for name in found:
            target = earlier / str(number) / name
            folder(target.parent)
            (self.path / name).rename(target)


def _write(handle: int, content: bytes) -> None:
    os.ftruncate(handle, 0)
    os.pwrite(handle, content, 0)


def _read(path: Path) -> RunIdentity | None:
    try:
        return read_json(RunIdentity, path)
    except InvalidFile:
        return None


def _is_ok(path: Path) -> bool:
    try:
        return read_json(dict[str, Any], path / "result.json").get("status") == "ok"
    except InvalidFile:
        return False
