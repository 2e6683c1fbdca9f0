"""The contract of a logger.

A logger is settings (`AbstractLogger`, described by a YAML file); `start` opens one record of one run
(`AbstractRecord`), and only the controller writes to it. A record never ends a run: where its back end fails, it says
so in `warnings` and does nothing from then on.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """The facts of a run that a logger gets before the run starts.

    Args:
        run_dir: folder of the run's files.
        name: a name for people, as in `digits-graphpipe`.
        config: the resolved configuration in plain dicts and lists.
        group: one name for all jobs of a sweep; None outside one.
        tags: short words to filter by.
        first_step: steps of the run that this one resumes.
    """

    run_dir: Path
    name: str
    config: Mapping[str, Any] = field(default_factory=dict)
    group: str | None = None
    tags: tuple[str, ...] = ()
    first_step: int = 0


class AbstractRecord(ABC):
    """One run's record, as a context manager: leaving it finishes the record, also after an exception."""

    @property
    @abstractmethod
    def hints(self) -> tuple[str, ...]:
        """Command lines for the user to look at or upload the record."""

    @property
    @abstractmethod
    def warnings(self) -> tuple[str, ...]:
        """Errors of the back end, in words."""

    @abstractmethod
    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record values of one training step (0-based): `loss`, `iteration_s`, `samples_per_s`, ..."""

    @abstractmethod
    def log_eval(self, step: int, values: Mapping[str, float]) -> None:
        """Record values of one evaluation after `step` steps."""

    @abstractmethod
    def log_html(self, path: Path, name: str = "report") -> None:
        """Record a self-contained page."""

    @abstractmethod
    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Record a table of plain values."""

    @abstractmethod
    def log_file(self, path: Path) -> None:
        """Keep a file with the record, as the trace."""

    @abstractmethod
    def finish(self, summary: Mapping[str, Any] | None = None) -> None:
        """Close the record, with the last values by name (nested dicts are allowed). A second call does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.finish()


class AbstractLogger(ABC):
    """The settings of a logger."""

    @abstractmethod
    def start(self, run: RunInfo) -> AbstractRecord:
        """Open a record; a back end that cannot start gives one that warns and does nothing."""
