"""Whatever a run leaves on the disk is written here: whole or not at all, without secrets, and for its user alone.

    write_text, write_bytes, write_tensors, fresh   a file that others see whole, or as it was before
    open_lines, open_late, open_binary, descriptor  a file that grows, or that several processes write to
    folder, complete, copy                          folders
    temporary                                       a folder that is gone after its process, however that ends

Text is masked (`gpp.private`); `exact=True` is for what a program reads back: its secret settings are held apart instead.
Files have the mode 0600 and folders 0700, set here and not by the process's umask, which belongs to the user's own code.
`tests/test_files_written.py` finds every place that opens a file for writing elsewhere.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import shutil
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, BinaryIO, TextIO, final

from gpp.private import MaskedStream, hidden, masked, masked_json

FILE, FOLDER = 0o600, 0o700

NEW = ".new"
"""End of the hidden name that a file has before it is whole."""

HELD = ".held"
"""End of the name of a temporary folder whose process holds a lock on it."""

_numbers = itertools.count()


def folder(path: str | Path) -> Path:
    """Make a folder, and those above it, as far as they are missing."""
    path = Path(path)
    if not path.parent.exists():
        folder(path.parent)
    try:
        os.mkdir(path, FOLDER)
    except FileExistsError:
        if not path.is_dir():
            raise
    return path


def close_to_others(path: Path) -> None:
    """Take all rights of others from a folder that an earlier version left."""
    with suppress(OSError):
        if path.is_dir() and not path.is_symlink() and path.stat().st_mode & 0o077:
            path.chmod(FOLDER)


@contextmanager
def fresh(path: str | Path, *, synced: bool = False) -> Iterator[Path]:
    """A hidden name beside a file, which takes the file's place when the block ends.

    Args:
        synced: whether it is on the disk before it has its name, so that not even a power failure leaves half of it.
    """
    path = Path(path)
    folder(path.parent)
    part = path.with_name(f".{path.name}.{os.getpid()}.{next(_numbers)}{NEW}")
    try:
        os.close(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, FILE))
        yield part
        part.chmod(FILE)
        if synced:
            sync(part)
        os.replace(part, path)
    except BaseException:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        raise


def write_text(path: str | Path, text: str, *, exact: bool = False, synced: bool = False) -> None:
    """Write a text file.

    Args:
        exact: whether a program reads it back, and must find what was written.
        synced: as `fresh` has it.
    """
    text = hidden(text) if exact else masked_json(text) if Path(path).suffix in (".json", ".jsonl") else masked(text)
    write_bytes(path, text.encode(), synced=synced)


def write_bytes(path: str | Path, content: bytes, *, synced: bool = False) -> None:
    """Write a file as it is. Arguments as of `fresh`."""
    with fresh(path, synced=synced) as part, open(part, "wb") as file:
        file.write(content)


def write_tensors(path: str | Path, tensors: Mapping[str, Any], *, synced: bool = False) -> None:
    """Write torch tensors by name, as safetensors, which refuses two of one memory: each but the first is copied.

    Args:
        tensors: contiguous.
        synced: as `fresh` has it.
    """
    from safetensors.torch import save_file

    copied, end = set[str](), 0
    for begin, name in sorted((tensor.data_ptr(), name) for name, tensor in tensors.items()):
        if begin < end:
            copied.add(name)
        end = max(end, begin + tensors[name].nbytes)
    with fresh(path, synced=synced) as part:
        save_file({name: tensor.clone() if name in copied else tensor for name, tensor in tensors.items()}, part)


def claim_text(path: Path, text: str) -> bool:
    """Write a file that nobody else has written; False where somebody has."""
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, FILE)
    except FileExistsError:
        return False
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(masked_json(text))
    return True


def open_lines(path: str | Path, *, json: bool = True) -> TextIO:
    """A new text file to which lines are added, each visible at once to whoever reads meanwhile.

    Args:
        json: whether every line is JSON.
    """
    file = open(path, "w", buffering=1, encoding="utf-8", opener=_opener)  # noqa: SIM115
    return MaskedStream(file, lines=json)  # type: ignore[return-value]


def open_binary(path: str | Path, mode: str = "wb") -> BinaryIO:
    """A file for bytes; `mode` is one of "wb", "r+b" and "ab"."""
    return open(path, mode, opener=_opener)  # type: ignore[return-value]


def _opener(path: str, flags: int) -> int:
    return os.open(path, flags, FILE)


def descriptor(path: str | Path, flags: int) -> int:
    """A descriptor of a file, which is made where there is none."""
    return os.open(path, flags | os.O_CREAT | os.O_CLOEXEC, FILE)


@final
class LateFile:
    """A text stream to the end of a file, which is made when something is written."""

    def __init__(self, path: Path) -> None:
        self._path, self._file = path, None

    def write(self, words: str) -> int:
        file: IO[str] = self._file or open(self._path, "a", encoding="utf-8", opener=_opener)  # noqa: SIM115
        self._file = file
        return file.write(masked(words))

    def flush(self) -> None:
        if self._file is not None:
            self._file.flush()


def anonymous(path: Path | None = None) -> Any:
    """A file without a name in a folder, or in the temporary one, gone when it is closed."""
    return tempfile.TemporaryFile(dir=path)


def link(path: Path, target: str) -> None:
    """Point a symbolic link at something else; whoever follows it meanwhile comes to the old target or to the new one."""
    part = path.with_name(f".{path.name}.{os.getpid()}{NEW}")
    part.unlink(missing_ok=True)
    part.symlink_to(target)
    os.replace(part, path)


def copy(source: Path, target: Path) -> None:
    """Copy a file, or a folder with all that is in it."""
    if source.is_dir():
        folder(target)
        for path in source.iterdir():
            copy(path, target / path.name)
    else:
        write_bytes(target, source.read_bytes())


def complete(part: Path, whole: Path) -> None:
    """Give a folder the name that says it is whole, once its files are on the disk; one of that name gives way to it."""
    sync(part)
    old = whole.with_name(f".{whole.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if whole.exists():
        whole.rename(old)
    part.rename(whole)
    sync(whole.parent)
    shutil.rmtree(old, ignore_errors=True)


def sync(path: Path) -> None:
    """Wait until a file or folder is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def drop_unfinished(path: Path) -> None:
    """Remove what processes that were killed had not written to its end, right below a folder that nobody else writes to."""
    for part in path.glob(f".*{NEW}"):
        with suppress(OSError):
            part.unlink()


@final
class TemporaryFolder:
    """A folder of the temporary folder that only this user enters, removed by `close`, at the end of the process, or, where that
    was killed, by the next process that makes one.

    The process holds a lock on the folder, which ends with it: so a folder without one is nobody's, in whatever namespace its
    process had its number.

    Args:
        what: a word of its name.
    """

    def __init__(self, what: str) -> None:
        sweep()
        # Under the name that others look at only once it is locked.
        made = tempfile.mkdtemp(prefix=f"gpp-{what}-")
        self._lock = os.open(made, os.O_RDONLY | os.O_CLOEXEC)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self.path = Path(f"{made}{HELD}")
        os.rename(made, self.path)
        self._end = weakref.finalize(self, _remove, self.path, self._lock, os.getpid())

    def close(self) -> None:
        """Remove the folder."""
        self._end()


def _remove(path: Path, lock: int, owner: int) -> None:
    if os.getpid() != owner:
        return  # a fork: the folder is its parent's
    shutil.rmtree(path, ignore_errors=True)
    with suppress(OSError):
        os.close(lock)


def sweep() -> None:
    """Remove temporary folders of this user's processes that have been killed."""
    for path in Path(tempfile.gettempdir()).glob(f"gpp-*{HELD}"):
        with suppress(OSError):
            if path.is_symlink() or path.stat().st_uid != os.getuid():
                continue
            handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(handle)
