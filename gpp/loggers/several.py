"""Several records as one: what a run uses, metrics.jsonl and the tracker that the user chose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gpp.loggers.base import AbstractLogger, AbstractRecord, RunInfo
from gpp.loggers.jsonl import Jsonl


class Several(AbstractRecord):
    """Hands everything to each of its records, in order."""

    def __init__(self, records: Sequence[AbstractRecord]) -> None:
        self._records = tuple(records)

    @property
    def hints(self) -> tuple[str, ...]:
        return tuple(hint for record in self._records for hint in record.hints)

    @property
    def warnings(self) -> tuple[str, ...]:
        return tuple(warning for record in self._records for warning in record.warnings)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for record in self._records:
            record.log(step, values)

    def log_eval(self, step: int, values: Mapping[str, float]) -> None:
        for record in self._records:
            record.log_eval(step, values)

    def log_html(self, path: Path, name: str = "report") -> None:
        for record in self._records:
            record.log_html(path, name)

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        for record in self._records:
            record.log_table(name, columns, rows)

    def log_file(self, path: Path) -> None:
        for record in self._records:
            record.log_file(path)

    def finish(self, summary: Mapping[str, Any] | None = None) -> None:
        for record in self._records:
            record.finish(summary)


def start_record(logger: AbstractLogger | None, run: RunInfo) -> Several:
    """The record of a run: metrics.jsonl always, then `logger`'s."""
    records: list[AbstractRecord] = [Jsonl().start(run)]
    if logger is not None and not isinstance(logger, Jsonl):
        records.append(logger.start(run))
    return Several(records)
