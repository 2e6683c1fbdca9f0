"""Errors as a tree; the exit code of `run.py` follows from the branch.

GppError
├── InvalidConfig     what the user wrote: field, value, rule, fix                (exit 2)
│   └── InvalidFile   a file that cannot be read as what it should be: file, place, value, rule, fix
├── InvalidGraph      a hand-written or stored operator graph breaks a rule       (exit 2)
├── CaptureError      a model that cannot be captured: which op, where            (exit 2)
├── InvalidPlan       a plan that is not a partition into a convex, acyclic DAG   (exit 2)
├── UnsupportedPlan   an engine was handed a plan that it cannot run              (exit 2)
├── Infeasible        no plan fits; a result, not a crash                         (exit 3)
├── MalformedProgram  a program that would deadlock; names the blocked actions    (exit 1)
├── Exhausted         the machine has no more space, memory or file handles       (exit 1)
│   └── OutOfMemory   a device has no more memory: where, asked for, held, planned
├── NonFinite         a training whose loss or weights are not finite; says where (exit 1)
└── WorkerFailed      a worker process died; its own traceback comes first        (exit 1)
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

LONGEST = 120
"""Characters of a value that a message shows."""

LONGEST_PATH = 1024
"""Characters of a file's path that a message shows."""

_UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters, which a terminal obeys; characters that turn the direction of text; halves of characters."""


def printable(text: str) -> str:
    r"""The text with every character that a terminal or a reader would obey written as an escape; lines and tabs stay.

    Example: `printable("\x1b[31mred") == r"\x1b[31mred"`.
    """
    if text.isascii() and text.isprintable():
        return text
    return _UNSEEN.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def counted(count: int, noun: str) -> str:
    """A number of things, as `1 stage`, `2 stages` and `2 strategies`."""
    many = f"{noun[:-1]}ies" if noun.endswith("y") and noun[-2] not in "aeiou" else f"{noun}s"
    return f"{count} {noun if count == 1 else many}"


def written(value: object) -> str:
    """A value as a user writes it in YAML or on the command line; a long one is cut, and a huge integer counted.

    Nothing in it moves a terminal's cursor, or starts a new line.
    """
    try:
        text = _written(value)
    except RecursionError:
        text = f"a {type(value).__name__} of many levels"
    return printable(text).replace("\n", "\\n").replace("\t", "\\t")


def _written(value: object) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int) and value.bit_length() > 200:
        return f"{'-' if value < 0 else ''}(an integer of about {round(value.bit_length() * 0.30103)} digits)"
    if isinstance(value, list | tuple):
        text = f"[{','.join(map(_written, value))}]"
    elif isinstance(value, dict):
        text = f"{{{','.join(f'{_written(key)}:{_written(item)}' for key, item in value.items())}}}"
    elif isinstance(value, str):
        text = repr(value) if _reads_as_another(value) else value
    else:
        try:
            text = str(value)
        except ValueError:  # a huge integer is somewhere in it
            text = f"a {type(value).__name__}"
    return text if len(text) <= LONGEST else f"{text[: LONGEST // 2]}... ({len(text)} characters)"


def _reads_as_another(text: str) -> bool:
    """Whether a text without quotes would be read as something else: nothing, a number, a truth value or null."""
    try:
        float(text)
    except ValueError:
        return not text.strip() or text.lower() in ("null", "none", "true", "false")
    return True


class GppError(Exception):
    """Base of everything this package raises on purpose. Its text is safe to print, whatever names it quotes."""

    exit_code = 1

    def __str__(self) -> str:
        return printable(super().__str__())


class InvalidConfig(GppError, ValueError):
    """A user setting breaks a rule. The message names field, value, rule and fix."""

    exit_code = 2

    def __init__(self, field: str, value: object, rule: str, fix: str) -> None:
        super().__init__(f"{field}={written(value)}: {rule}. Fix: {fix}.")
        self.field, self.value, self.rule, self.fix = field, value, rule, fix

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), (self.field, self.value, self.rule, self.fix)


class InvalidFile(InvalidConfig):
    """A file is not what it should be.

    Args:
        path: the file.
        place: where in it: `stages[3].k`, or `:3:14` for a line and a column; empty for the file as a whole.
        value: what stands there, in a list of its own; empty where the rule says it all.
        setting: the setting that names the file; empty where none does.
    """

    def __init__(self, path: object, place: str, rule: str, fix: str, value: Iterable[object] = (), setting: str = "") -> None:
        self.path, self.place, self.setting, self.values = path, place, setting, tuple(value)
        file = text if len(text := str(path)) <= LONGEST_PATH else f"{text[:LONGEST]}... ({len(text)} characters)"
        place = place if len(place) <= LONGEST_PATH else f"{place[:LONGEST]}... ({len(place)} characters)"
        where = f"{file}{place}" if place.startswith(":") or not place else f"{file}: {place}"
        named = f"{setting}={where}" if setting else where
        shown = "".join(f"={written(item)}" for item in self.values)
        GppError.__init__(self, f"{named}{shown}: {rule}. Fix: {fix}.")
        self.field, self.value, self.rule, self.fix = setting or place, path, rule, fix

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), (self.path, self.place, self.rule, self.fix, self.values, self.setting)


class InvalidGraph(GppError, ValueError):
    """An operator graph breaks a rule (cycle, unknown operator, duplicate name)."""

    exit_code = 2


class CaptureError(GppError):
    """A model could not be captured; the message names the operation and the user's line."""

    exit_code = 2


class InvalidPlan(GppError, ValueError):
    """A plan is not a partition of the operators into convex stages on disjoint devices."""

    exit_code = 2


class UnsupportedPlan(GppError):
    """An engine was handed a plan that it cannot run; the message says why."""

    exit_code = 2


class Infeasible(GppError):
    """No plan fits. Carries the tightest constraint and the smallest change that would help."""

    exit_code = 3

    def __init__(self, constraint: str, remedy: str) -> None:
        super().__init__()
        self._find: Callable[[], Infeasible] | None = None
        self._said, self._short = (constraint, remedy), constraint.partition(":")[0]

    @classmethod
    def later(cls, short: str, find: Callable[[], Infeasible]) -> Infeasible:
        """One whose words are found when somebody reads them: that takes many searches, and who tries sizes reads the last.

        Args:
            short: what is known at once.
        """
        error = cls("", "")
        error._find, error._short = find, short
        return error

    @property
    def short(self) -> str:
        """That nothing fits, without what lacks and what would help."""
        return self._short

    @property
    def constraint(self) -> str:
        return self._words()[0]

    @property
    def remedy(self) -> str:
        return self._words()[1]

    def _words(self) -> tuple[str, str]:
        if self._find is not None:
            self._said, self._find = self._find()._words(), None
        return self._said

    def __str__(self) -> str:
        return f"{self.constraint}. Smallest change that fits: {self.remedy}."

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), (self.constraint, self.remedy)


class MalformedProgram(GppError):
    """A program cannot run to its end; the message lists the blocked actions and prints the grid."""


class Exhausted(GppError):
    """The machine refused what every program needs; the message says what, and where."""

    @classmethod
    def of(cls, error: BaseException) -> Exhausted | None:
        """The same said plainly, where an error or its cause is of this kind; None for any other error."""
        while error.__cause__ is not None and not isinstance(error, GppError):
            error = error.__cause__
        if isinstance(error, Exhausted):
            return error
        if "Could not determine home directory" in str(error):
            return cls(f"{error} Fix: set HOME, or cache_dir=FOLDER")
        path = ""
        if isinstance(error, OSError):
            if "No usable temporary directory" in str(error):
                return cls(f"{error.strerror}. Fix: set TMPDIR to a folder that can be written")
            number, path = error.errno, str(error.filename or "")
        elif isinstance(error, MemoryError) or "can't allocate memory" in str(error) or os.strerror(errno.ENOMEM) in str(error):
            number = errno.ENOMEM
        elif str(error) in (os.strerror(errno.EAGAIN), "can't start new thread"):
            number = errno.EAGAIN
        else:
            # Libraries in Rust have the number in their text only.
            found = re.search(r"\(os error (\d{1,4})\)", str(error))
            number = int(found[1]) if found else None
        if number not in REMEDIES:
            return None
        return cls(f"{os.strerror(number)}{f' ({path})' if path else ''}. Fix: {REMEDIES[number]}")


ROOM = "free some space, or write to another disk (hydra.run.dir=...)"
REMEDIES = {
    errno.ENOSPC: ROOM,
    errno.EDQUOT: ROOM,
    errno.EFBIG: "raise the limit on the size of a file (ulimit -f)",
    errno.EROFS: "write to another disk (hydra.run.dir=...)",
    errno.EMFILE: "raise the limit on open files (ulimit -n)",
    errno.EAGAIN: "raise the limit on processes and threads (ulimit -u)",
    errno.ENFILE: "raise the system's limit on open files",
    errno.ENOMEM: "use a smaller microbatch_size or minibatch_size, more devices, or a machine with more memory",
}
"""Numbers of errors that are the machine's, and what helps."""


@contextmanager
def readable(field: str, value: object) -> Iterator[None]:
    """Refuse a setting whose files this user may not read.

    Raises:
        InvalidConfig: a file or folder was closed to this user while the block ran.
    """
    try:
        yield
    except PermissionError as error:
        rule = f"cannot be read by this user ({error.filename}: {error.strerror})"
        raise InvalidConfig(field, value, rule, "let its owner open it (chmod -R a+rX), or name another") from None


class OutOfMemory(Exhausted):
    """A device has less memory than its share of a plan takes; the message says where, and what the plan had predicted."""


class NonFinite(GppError):
    """A loss, or the weights, of a training are not finite; the message says in which step, stage and micro-batch."""


class OffPace(GppError):
    """Workers that serve take longer than the plan says, against the one that keeps it best.

    Args:
        off: rank -> how many times as long, of those that are off their time.
        factors: of all ranks.
    """

    def __init__(self, off: dict[int, float], factors: dict[int, float]) -> None:
        which = ", ".join(f"worker {rank} takes {factor:.2f} times as long" for rank, factor in sorted(off.items()))
        super().__init__(f"{which} as planned")
        self.off, self.factors = off, factors


class WorkerFailed(GppError):
    """A worker process failed; carries its rank and its own traceback.

    `gone` are the ranks whose processes or machines are no more, so that the same work would do elsewhere; none where the work
    itself failed.
    """

    def __init__(self, rank: int, reason: str, traceback: str = "", gone: tuple[int, ...] = ()) -> None:
        super().__init__(f"worker {rank} failed: {reason}")
        self.rank, self.reason, self.traceback, self.gone = rank, reason, traceback, gone

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), (self.rank, self.reason, self.traceback, self.gone)
