"""The runs of a folder, read from the files that they have written."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar, final
from urllib.parse import urlencode

from gpp.app.recording import Timelines
from gpp.errors import GppError
from gpp.formats.pipeedge.yaml import read_yaml
from gpp.report.draw import text
from gpp.report.draw.page import Cell, Column, PageTable
from gpp.report.draw.svg import Drawing, element
from gpp.report.sweep.jobs import RESULT, ResultFile, source_of
from gpp.runtime.run_dir import RUN, RunIdentity, is_locked, run_of
from gpp.serialization import flatten, read_json
from gpp.ui.settings import CONFIG

T = TypeVar("T")
SAID_BELOW = re.compile(r"/\d{4}-\d\d-\d\d_[\d-]+$|-[0-9a-f]{16}$")
"""The end of a run directory's name that is its time, or the hash of its settings; the table has these in words below the name."""
OWN_COLUMN = ("model=", "strategy=", "cluster=", "engine=", "hydra.")
"""Words of a command that the table of runs has elsewhere."""
MARKS = (RESULT, RUN)
"""Files by which a folder is a run's."""


@final
@dataclass(frozen=True, eq=False)
class RunFiles:
    """A run directory. What its files do not tell, or tell wrongly, is None.

    Args:
        name: its path in the folder that is shown; `.` for that folder itself.
    """

    name: str
    path: Path

    @cached_property
    def result(self) -> ResultFile:
        """Its result, or the status of a run without one."""
        if (found := self.read(ResultFile, RESULT)) is not None:
            return found
        words = "under way" if is_locked(self.path) else "no result.json that can be read: it was ended from outside"
        model, strategy, cluster, engine = (
            self.settings.get(f"{part}.name") for part in ("model", "strategy", "cluster", "engine")
        )
        return ResultFile(status="failed", reason=words, model=model, strategy=strategy, cluster=cluster, engine=engine)

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Its settings by dotted names; none where they cannot be read."""
        try:
            return flatten(read_yaml(dict, self.path / CONFIG, setting="RUN_DIR"))
        except GppError:
            return {}

    @property
    def under_way(self) -> bool:
        """Whether it has not ended."""
        return is_locked(self.path)

    @cached_property
    def identity(self) -> RunIdentity:
        """Which run it is; its words are empty where nobody says."""
        with suppress(GppError):
            if (found := run_of(self.path)) is not None:
                return found
        return RunIdentity(id="", started="", command="", pid=0, host="")

    @property
    def timelines(self) -> Timelines:
        """What was predicted, and what was measured."""
        return self.read(Timelines, "timeline.json") or Timelines(predicted=None, measured=None)

    @property
    def has_report(self) -> bool:
        """Whether its own page is there."""
        return self.inside("report.html") is not None

    def link(self, page: str) -> str:
        """The address of `page` for this run."""
        return f"{page}?{urlencode({'run': self.name})}"

    def inside(self, name: str) -> Path | None:
        """A regular file of the directory; None where there is none, or a link that leads out."""
        path = self.path / name
        return path if path.is_file() and path.resolve().is_relative_to(self.path.resolve()) else None

    def read(self, cls: type[T], name: str) -> T | None:
        """The value of a file of the directory."""
        try:
            return read_json(cls, path) if (path := self.inside(name)) else None
        except GppError:
            return None


def found_runs(folder: Path) -> dict[str, RunFiles]:
    """The runs of a folder by their names, those that began last first. Links are not followed, runs inside runs left out."""
    found = []
    for path, folders, files in os.walk(folder):
        if set(MARKS) & set(files):
            name = Path(path).relative_to(folder).as_posix()
            found.append(RunFiles(name, Path(path)))
            folders.clear()
        folders[:] = [each for each in folders if not each.startswith(".")]
    # A run directory has its time in its name, and tells it in run.json.
    return {run.name: run for run in sorted(found, key=lambda run: (run.identity.started, run.name), reverse=True)}


def table(runs: Mapping[str, RunFiles]) -> PageTable:
    """A row for each run, with a box to choose it for a comparison."""
    source = source_of(run.result for run in runs.values())
    words, figures = ("", "run", "status", "model", "strategy", "cluster"), ("predicted", source, "memory", "loss")
    rows = [_row(run, apart) for run, apart in zip(runs.values(), _words_apart(list(runs.values())), strict=True)]
    kinds = [Column(name=name) for name in words] + [Column(name=name, kind="n") for name in figures]
    return PageTable(columns=kinds, rows=rows)


def _words_apart(runs: Sequence[RunFiles]) -> list[str]:
    """For each run the words of its command that not all runs beside it in their folder have."""
    words, beside = {run.name: run.identity.command.split() for run in runs}, defaultdict[Path, list[set[str]]](list)
    for run in runs:
        beside[run.path.parent].append(set(words[run.name]))
    shared = {folder: set.intersection(*each) for folder, each in beside.items()}

    def apart(run: RunFiles) -> str:
        own = (word for word in words[run.name] if "=" in word and not word.startswith(OWN_COLUMN))
        return text.shorten_end(" ".join(word for word in own if word not in shared[run.path.parent]), 60)

    return [apart(run) for run in runs]


def _row(run: RunFiles, apart: str) -> list[str | Cell]:
    result = run.result
    predicted, measured = result.get("predicted") or {}, result.get("measured") or {}
    peaks = [peak for peak in (predicted.get("peak_memory_bytes") or {}).values() if peak is not None]
    losses = [loss for loss in result.get("loss") or [] if loss is not None]
    box = element("input", type="checkbox", name="run", value=run.name, aria_label=f"compare {run.name}")
    linked = run.link("run") if run.inside(CONFIG) else run.link("report") if run.has_report else ""
    status = Cell(text="under way", look="line") if run.under_way else Cell(text=str(result["status"]), look="status")
    model, strategy, cluster, engine = (str(result.get(name) or "–") for name in ("model", "strategy", "cluster", "engine"))
    below = ", ".join(words for words in (run.identity.started[:16].replace("T", " "), apart) if words)
    return [
        Drawing(box),
        Cell(text=SAID_BELOW.sub("", run.name), link=linked, small=below),
        status,
        model,
        strategy,
        Cell(text=cluster, small=engine),
        text.seconds(predicted.get("iteration_s")),
        text.seconds(measured.get("iteration_s")),
        text.num_bytes(max(peaks, default=None)),
        text.significant(losses[-1], 4) if losses else "–",
    ]
