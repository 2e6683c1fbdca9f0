"""No tracker: metrics.jsonl and the report remain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gpp.loggers.base import AbstractLogger, AbstractRecord, RunInfo
from gpp.settings import settings


class NoRecord(AbstractRecord):
    """A record that keeps nothing."""

    @property
    def hints(self) -> tuple[str, ...]:
        return ()

    @property
    def warnings(self) -> tuple[str, ...]:
        return ()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        pass

    def log_eval(self, step: int, values: Mapping[str, float]) -> None:
        pass

    def log_html(self, path: Path, name: str = "report") -> None:
        pass

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        pass

    def log_file(self, path: Path) -> None:
        pass

    def finish(self, summary: Mapping[str, Any] | None = None) -> None:
        pass


@settings("logger")
class NoLogger(AbstractLogger):
    """A logger that writes nothing beyond the files of every run."""

    def start(self, run: RunInfo) -> NoRecord:
        return NoRecord()
