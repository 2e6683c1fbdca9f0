"""What a logger promises.

A logger is settings (`AbstractLogger`, what a YAML file describes); `start` opens one record of one run
(`AbstractRecord`), which the controller alone writes to. A record never ends a run: where its back end
fails, it says so in `warnings` and keeps quiet from then on.
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
    """What a logger may know of a run before it starts.

    Args:
        run_dir: where the run keeps its files.
        name: for people, as in `digits-graphpipe`.
        config: the resolved configuration in plain dicts and lists.
        group: one name for all jobs of a sweep; None outside one.
        tags: short words to filter by.
        first_step: steps that came before, in the run that this one resumes.
    """

    run_dir: Path
    name: str
    config: Mapping[str, Any] = field(default_factory=dict)
    group: str | None = None
    tags: tuple[str, ...] = ()
    first_step: int = 0


class AbstractRecord(ABC):
    """One run's record. A context manager: leaving it finishes the record, also after an exception."""

    @property
    @abstractmethod
    def hints(self) -> tuple[str, ...]:
        """Command lines for the user to look at or upload the record."""

    @property
    @abstractmethod
    def warnings(self) -> tuple[str, ...]:
        """What went wrong in the back end, in words."""

    @abstractmethod
    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Values of one training step (0-based): `loss`, `iteration_s`, `samples_per_s`, ..."""

    @abstractmethod
    def log_eval(self, step: int, values: Mapping[str, float]) -> None:
        """Values of one evaluation after `step` steps."""

    @abstractmethod
    def log_html(self, path: Path, name: str = "report") -> None:
        """A self-contained page."""

    @abstractmethod
    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """A table of plain values."""

    @abstractmethod
    def log_file(self, path: Path) -> None:
        """A file to keep with the record, as the trace."""

    @abstractmethod
    def finish(self, summary: Mapping[str, Any] | None = None) -> None:
        """Close the record, with the last values by name (nested dicts are allowed). A second call does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.finish()


class AbstractLogger(ABC):
    """Settings of a logger."""

    @abstractmethod
    def start(self, run: RunInfo) -> AbstractRecord:
        """Open a record; a back end that cannot start gives one that warns and does nothing."""
