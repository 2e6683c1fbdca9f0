"""metrics.jsonl: one line per step and per evaluation, readable while the run goes on. Every run writes it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpp.files import folder, open_lines
from gpp.loggers.base import AbstractRecord, End, RunInfo
from gpp.report.run.result import finite


class JsonlRecord(AbstractRecord):
    """Lines such as `{"step": 3, "loss": 1.2}`, and `{"step": 3, "eval": {"accuracy": 0.9}}` for an evaluation.

    The file keeps the steps of an earlier attempt that this run goes on from.
    """

    def __init__(self, run: RunInfo) -> None:
        self._file, path = None, run.run_dir / "metrics.jsonl"
        try:
            folder(run.run_dir)
            kept = _before(path, run.first_step)
            self._file = open_lines(path)
            self._file.writelines(kept)
        except OSError as error:
            self.warnings += (f"metrics are not written: {error}",)

    def _write(self, values: Mapping[str, Any]) -> None:
        if self._file is None:
            return
        try:
            self._file.write(json.dumps(finite(values), allow_nan=False) + "\n")
        except OSError as error:
            self.warnings += (f"metrics are no longer written: {error}",)
            self.finish()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._write({"step": step, **values})

    def log_eval(self, step: int, values: Mapping[str, float]) -> None:
        self._write({"step": step, "eval": dict(values)})

    def finish(self, summary: Mapping[str, Any] | None = None, end: End | None = None) -> None:
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except OSError as error:
                self.warnings += (f"metrics may be incomplete: {error}",)


def _before(path: Path, first_step: int) -> list[str]:
    """Lines of an earlier attempt in the same directory up to the step from which this one goes on."""
    if not first_step or not path.is_file():
        return []
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        try:
            record = json.loads(line)
        except ValueError:
            continue  # half a line from a run that was killed
        if line.endswith("\n") and record["step"] < first_step + ("eval" in record):
            kept.append(line)
    return kept
