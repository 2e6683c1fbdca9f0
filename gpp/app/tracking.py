"""A run and its trackers: opened when there is something to tell, told what the run is, and closed with its end.

Runs that train are told step by step. All others (plans, simulations, comparisons, failures before the first step) are told at
their end, in one go.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpp.app.several import SEVERAL
from gpp.loggers.base import AbstractRecord, End, MaskedRecord, RunInfo, start
from gpp.runtime.run_dir import RunDir

if TYPE_CHECKING:
    from gpp.app.experiment import Experiment
    from gpp.report.run.record import RunRecord


class Tracking:
    """The records of one run: metrics.jsonl where it has steps, and those of the loggers that the user has chosen.

    Args:
        config, group: see `gpp.app.recording.Recorder`.
        warn: tells the user that a back end has failed.
    """

    def __init__(
        self,
        experiment: Experiment,
        directory: RunDir,
        *,
        config: Mapping[str, Any],
        group: str | None,
        warn: Callable[[str], None],
    ) -> None:
        self.experiment, self._directory, self._config, self._group, self._warn = experiment, directory, config, group, warn
        self._records: list[AbstractRecord] = []
        self._opened = False
        self._early, self._said = list[str](), set[str]()

    def open(self, *, steps: bool, first_step: int = 0) -> None:
        """Open the records, unless they are; what was printed before is told.

        Args:
            steps: whether there will be steps, which metrics.jsonl holds.
        """
        if self._opened:
            return
        self._opened = True
        e = self.experiment
        if not steps and not e.logger:
            return
        strategies = ", ".join(strategy.name for strategy in e.strategies) if e.mode in SEVERAL else e.strategy.name
        names = {"model": e.model.name, "strategy": strategies, "cluster": e.cluster.name, "engine": e.engine.name}
        simulates = e.mode == "train" and not e.engine.runs
        info = RunInfo(
            run_dir=self._directory.path,
            first_step=first_step,
            name=e.name,
            kind="simulate" if simulates else e.mode,
            config=self._config,
            facts={**{f"{name}_name": value for name, value in names.items()}, "command": self._directory.command},
            group=self._group,
            tags=tuple(dict.fromkeys((e.model.name, e.mode if e.mode in SEVERAL else e.strategy.name, e.cluster.name))),
            commit=commit_of(Path.cwd()) if e.logger else None,
        )
        if steps:
            from gpp.loggers.jsonl import JsonlRecord

            self._records.append(MaskedRecord(JsonlRecord(info)))
        self._records += [start(logger, info) for logger in e.logger.values()]
        for words in self._early:
            self.heard(words)
        self._early.clear()
        self._listen()

    def _listen(self) -> None:
        """Tell the user, once, what back ends complain about."""
        for record in self._records:
            for warning in record.warnings:
                if warning not in self._said:
                    self._said.add(warning)
                    self._warn(warning)

    def heard(self, words: str) -> None:
        """Tell what the run prints."""
        if not self._opened:
            self._early.append(words)
        for record in self._records:
            record.log_console(words)

    def step(self, step: int, values: Mapping[str, float | None]) -> None:
        """Tell the values of a step (0-based); the learning rate of a training is added.

        Args:
            values: None where one is not known.
        """
        e = self.experiment
        rate = {"learning_rate": e.optimizer.lr * e.optimizer.learning_rate.factor(step, e.num_steps)} if e.trains else {}
        known = {name: value for name, value in {**values, **rate}.items() if value is not None}
        for record in self._records:
            record.log(step, known)
        self._listen()

    def evaluation(self, values: Mapping[str, Any]) -> None:
        """Tell an evaluation, `{"step": steps done, name: value, ...}`."""
        for record in self._records:
            record.log_eval(values["step"], {name: value for name, value in values.items() if name != "step"})
        self._listen()

    def tell(self, run: RunRecord, *, page: Path, files: Sequence[Path]) -> list[str]:
        """Tell what the run is: its tables, drawings, report and files; returns the commands to look at it."""
        trackers = [record for record in self._records if record.shows]
        if trackers:
            from gpp.app.tracked import drawings, tables

            found, drawn = tables(run), drawings(run)
            for record in trackers:
                for table in found:
                    record.log_table(*table)
                for name, svg in drawn.items():
                    record.log_drawing(name, svg)
                record.log_page("report", page)
                for file in files:
                    record.log_file(file)
        self._listen()
        return [hint for record in self._records for hint in record.hints]

    def close(self, run: RunRecord | None, exit_code: int, reason: str | None) -> None:
        """Close the records with the run's summary and end."""
        values: dict[str, Any] = {}
        if run is not None and self._records:
            from gpp.app.tracked import summary

            values = summary(run)
        for record in self._records:
            record.finish(values, End(exit_code=exit_code, reason=reason))
        self._listen()
        self._records = []


def commit_of(folder: Path) -> str | None:
    """The git commit of a folder, with `-dirty` where tracked files differ from it; None without git or outside a repository."""
    words = ("git", "-C", os.fspath(folder), "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty")
    try:
        found = subprocess.run(words, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() or None if found.returncode == 0 else None
