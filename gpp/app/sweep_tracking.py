"""A sweep's own record in the trackers: its table, its figures, its report, in one group with the records of its jobs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gpp.app.tracking import commit_of
from gpp.loggers.base import AbstractLogger, End, RunInfo, start
from gpp.report.draw.svg import standalone
from gpp.report.sweep.files import result_rows, summarise
from gpp.report.sweep.jobs import SETUP, SweepJob
from gpp.report.sweep.page import general_charts
from gpp.serialization import flatten


def track_sweep(
    folder: Path, jobs: Sequence[SweepJob], loggers: Mapping[str, AbstractLogger], *, command: str, end: End
) -> tuple[list[str], list[str]]:
    """Record a sweep that has ended, from the files in its directory.

    Args:
        command: that started it.

    Returns:
        Commands to look at the records, and warnings of back ends.
    """
    hints, warnings = list[str](), list[str]()
    told = {name: sorted({str(job.result.get(name)) for job in jobs}) for name in SETUP}
    facts = {**{f"{name}_name": ", ".join(values) for name, values in told.items()}, "command": command}
    config = {"jobs": len(jobs), "overrides": sorted({key for job in jobs for key in job.overrides})}
    info = RunInfo(
        run_dir=folder,
        name=folder.name,
        kind="sweep",
        config=config,
        facts=facts,
        group=folder.name,
        tags=("sweep",),
        commit=commit_of(Path.cwd()) if loggers else None,
    )
    for logger in loggers.values():
        with start(logger, info) as record:
            for name, columns, rows in (jobs_table(jobs), groups_table(jobs)):
                record.log_table(name, columns, rows)
            for name, svg in figures(folder, jobs).items():
                record.log_drawing(name, svg)
            record.log_page("report", folder / "report.html")
            record.log_file(folder / "results.csv")
            record.finish(sweep_summary(jobs, end), end)
            hints += record.hints
            warnings += record.warnings
    return hints, warnings


def figures(folder: Path, jobs: Sequence[SweepJob]) -> dict[str, str]:
    """The sweep's own figures as SVG files by name; the general charts of its page where it declares none."""
    own = {svg.stem: svg.read_text(encoding="utf-8") for svg in sorted(folder.glob("figure*.svg"))}
    charts = general_charts(jobs, summarise(jobs)["groups"])
    return own or {f"figure_{n}" if n > 1 else "figure": standalone(panel.chart) for n, panel in enumerate(charts, start=1)}


def jobs_table(jobs: Sequence[SweepJob]) -> tuple[str, list[str], list[list[Any]]]:
    """Name, columns and rows: results.csv without what each stage, device or step has a value of its own of."""
    columns, rows = result_rows(jobs)
    whole = [name for name in columns if not name.rpartition(".")[2].isdigit() and not name.startswith("loss")]
    known = [name for name in whole if any(row[name] is not None for row in rows)]
    return "jobs", ["job", *known], [[job.name, *(row[name] for name in known)] for job, row in zip(jobs, rows, strict=True)]


def groups_table(jobs: Sequence[SweepJob]) -> tuple[str, list[str], list[list[Any]]]:
    """Name, columns and rows: medians over the repetitions of a job, and speed-ups over the chain."""
    flat = [{**flatten(group), "jobs": len(group["jobs"])} for group in summarise(jobs)["groups"]]
    columns = list(dict.fromkeys(name for row in flat for name in row))
    known = [name for name in columns if any(row.get(name) is not None for row in flat)]
    return "groups", known, [[row.get(name) for name in known] for row in flat]


def sweep_summary(jobs: Sequence[SweepJob], end: End) -> dict[str, Any]:
    """The summary of a sweep: how the jobs ended, the fastest one, and how good the predictions were."""
    found = summarise(jobs)
    timed = [
        (of["iteration_s"], job)
        for job in jobs
        if (of := job.result.get("measured") or job.result.get("predicted")) and of.get("iteration_s") is not None
    ]
    best_s, best = min(timed, key=lambda pair: pair[0], default=(None, None))
    out = {"status": "failed" if end.exit_code else "ok", "reason": end.reason, "num_jobs": found["num_jobs"]}
    out |= {f"ended/{name}": count for name, count in found["counts"].items()}
    errors = found["errors"]["iteration_s"]
    out |= {"prediction_error_median": errors["median"], "prediction_error_max": errors["max"]}
    return {**out, "fastest_job": best and json.dumps(best.overrides), "fastest_iteration_s": best_s}
