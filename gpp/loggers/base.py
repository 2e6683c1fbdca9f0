"""The contract of a logger.

A logger is settings (`AbstractLogger`, described by a YAML file); `start` opens one record (`AbstractRecord`) of one run
or of one sweep, and only the controller writes to it. A record never ends a run: where its back end fails, it says so in
`warnings` and does nothing from then on.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self, final

from gpp.private import masked, masked_value


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """The facts of a run that a logger gets when it opens a record.

    Args:
        run_dir: folder of the run's files.
        name: a name for people, as in `digits-graphpipe`.
        kind: what is done: the run's mode, `simulate`, or `sweep`.
        config: the resolved configuration in plain dicts and lists.
        facts: what runs are looked for by, in one level: `model_name`, `strategy_name`, ...
        group: one name for all jobs of a sweep and for the sweep itself; None outside one.
        tags: short words to filter by.
        commit: the git commit of the working directory, with `-dirty` where files differ from it; None without git.
        first_step: steps of the run that this one resumes.
    """

    run_dir: Path
    name: str
    kind: str = "train"
    config: Mapping[str, Any] = field(default_factory=dict)
    facts: Mapping[str, str | None] = field(default_factory=dict)
    group: str | None = None
    tags: tuple[str, ...] = ()
    commit: str | None = None
    first_step: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """The end of a run.

    Args:
        exit_code: of the command; 0 if all is well.
        reason: why it is not 0.
    """

    exit_code: int = 0
    reason: str | None = None


class AbstractRecord:
    """The record of a run, as a context manager: leaving it finishes the record, also after an exception.

    A record leaves out what its own class does not override.
    """

    shows: ClassVar[bool] = False
    """Whether it keeps tables, drawings, pages or files, which take time to make."""

    hints: tuple[str, ...] = ()
    """Command lines for the user to look at or upload the record."""
    warnings: tuple[str, ...] = ()
    """Errors of the back end, in words."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record values of one training step (0-based): `loss`, `learning_rate`, `samples_per_s`, ..."""

    def log_eval(self, step: int, values: Mapping[str, float]) -> None:
        """Record values of one evaluation after `step` steps."""

    def log_console(self, words: str) -> None:
        """Record lines that the run has printed."""

    def log_page(self, name: str, path: Path) -> None:
        """Record a self-contained HTML page."""

    def log_drawing(self, name: str, svg: str) -> None:
        """Record a drawing, a whole SVG file."""

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Record a table of plain values; None where one is not known."""

    def log_file(self, path: Path) -> None:
        """Keep a file with the record, as the trace."""

    def finish(self, summary: Mapping[str, Any] | None = None, end: End | None = None) -> None:
        """Close the record with its last values by name. A second call does nothing.

        Args:
            summary: numbers, words and None.
            end: how the run has ended; None for well.
        """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.finish(end=None if error is None else End(exit_code=1, reason=str(error) or type(error).__name__))


PartialRecord = AbstractRecord  # the name in loggers for earlier versions


class AbstractLogger(ABC):
    """The settings of a logger."""

    @abstractmethod
    def check(self) -> None:
        """Refuse what cannot be recorded, before anything starts.

        Raises:
            InvalidConfig: the package that the logger needs is not installed.
        """

    @abstractmethod
    def start(self, run: RunInfo) -> AbstractRecord:
        """Open a record; a back end that cannot start gives one that warns and does nothing."""


def start(logger: AbstractLogger, run: RunInfo) -> AbstractRecord:
    """Open a record that no secret reaches."""
    known = replace(run, config=masked_value(run.config), facts=masked_value(run.facts))
    return MaskedRecord(logger.start(known))


@final
class MaskedRecord(AbstractRecord):
    """Tells another record what it is told. Pages and files are read from the disk, where they are masked already."""

    def __init__(self, record: AbstractRecord) -> None:
        self._record = record
        self.shows = record.shows  # type: ignore[misc]

    @property
    def hints(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._record.hints

    @property
    def warnings(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return tuple(map(masked, self._record.warnings))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._record.log(step, values)

    def log_eval(self, step: int, values: Mapping[str, float]) -> None:
        self._record.log_eval(step, values)

    def log_console(self, words: str) -> None:
        self._record.log_console(masked(words))

    def log_page(self, name: str, path: Path) -> None:
        self._record.log_page(name, path)

    def log_drawing(self, name: str, svg: str) -> None:
        self._record.log_drawing(name, masked(svg))

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        self._record.log_table(name, columns, masked_value(rows))

    def log_file(self, path: Path) -> None:
        self._record.log_file(path)

    def finish(self, summary: Mapping[str, Any] | None = None, end: End | None = None) -> None:
        reason = masked(end.reason) if end and end.reason else None
        self._record.finish(masked_value(summary), End(exit_code=end.exit_code, reason=reason) if end else None)
