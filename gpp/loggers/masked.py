"""What a record is told, without secrets: every logger is started here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, final

from gpp.loggers.base import AbstractLogger, AbstractRecord, End, RunInfo
from gpp.private import masked, masked_value


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
    def hints(self) -> tuple[str, ...]:
        return self._record.hints

    @property
    def warnings(self) -> tuple[str, ...]:
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
