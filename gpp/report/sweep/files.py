"""The files of a sweep: results.csv, summary.json and report.html from the jobs' result.json."""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gpp.files import write_text
from gpp.report.draw.svg import standalone
from gpp.report.draw.text import quotient
from gpp.report.run.result import finite, write_json
from gpp.report.sweep.figure import SweepFigure
from gpp.report.sweep.figure_chart import figure_svg
from gpp.report.sweep.jobs import SETUP, AskedJob, SweepJob, natural_order, numbers, read_jobs
from gpp.report.sweep.page import sweep_report
from gpp.serialization import flatten

REPEATS = ("seed", "repeat")
LEADING = ("status", "reason", *SETUP, "seed")
SOURCES = ("predicted", "measured")
PARTS = ("plan", *SOURCES, "final_metric")  # null where a job has none of them; they are no columns of their own
MEDIANS = ("iteration_s", "throughput_samples_per_s", "bubble_fraction", "communication_bytes")


def result_rows(jobs: Sequence[SweepJob]) -> tuple[list[str], list[dict[str, Any]]]:
    """Columns and rows of results.csv.

    Columns are result.json's dotted paths, then the overrides. An override of a result's own name (`strategy`)
    gets a column only where its values differ, as `override.strategy`.
    """
    flat = [flatten(job.result) for job in jobs]
    paths = dict.fromkeys(
        [*LEADING, *(f"{source}.{name}" for source in SOURCES for name in MEDIANS), *(p for row in flat for p in row)]
    )
    inner = [path for path in paths if path not in (*LEADING, *PARTS)]
    # The contract's order of the parts; device and stage numbers ascend within.
    order = {part: i for i, part in enumerate(("plan", *SOURCES, "loss", "final_metric"))}
    numbered = {path: natural_order(path) if path.rpartition(".")[2].isdigit() else [] for path in inner}
    inner.sort(key=lambda path: (order.get(path.partition(".")[0], len(order)), numbered[path]))
    columns = [*LEADING, *inner]
    rows = [{c: row.get(c) for c in columns} for row in flat]
    for key in dict.fromkeys(key for job in jobs for key in job.overrides):
        values = [job.overrides.get(key) for job in jobs]
        name = key
        if key in columns:
            if all(value is None or str(row[key]) == value for value, row in zip(values, rows, strict=True)):
                continue
            name = f"override.{key}"
        columns.append(name)
        for row, value in zip(rows, values, strict=True):
            row[name] = value
    return columns, rows


def results_csv(jobs: Sequence[SweepJob]) -> str:
    """results.csv as text: one row per job, in order; an unknown value is an empty cell."""
    columns, rows = result_rows(jobs)
    out = io.StringIO()
    writer = csv.DictWriter(out, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows({key: "" if value is None else value for key, value in row.items()} for row in rows)
    return out.getvalue()


def summarise(jobs: Sequence[SweepJob]) -> dict[str, Any]:
    """summary.json: one group for each setup, with medians over its ok jobs (seeds, repeats).

    A setup is (model, strategy, cluster, engine) and every other override but seeds. `speedup_over_sequential` is
    sequential's median iteration time divided by the group's, for the same model, cluster, engine and overrides (for
    another engine where a strategy brings its own), so above 1 is faster. `errors` are the relative errors of the
    measured groups' predictions: for the iteration time, and for that speed-up except for `sequential` itself.
    """
    varied = [
        key
        for key in dict.fromkeys(key for job in jobs for key in job.overrides)
        if key not in (*SETUP, *REPEATS) and not key.startswith("hydra.") and len({job.overrides.get(key) for job in jobs}) > 1
    ]
    members: dict[tuple[Any, ...], list[SweepJob]] = {}
    for job in jobs:
        key = (*(job.result.get(name) for name in SETUP), *(job.overrides.get(name) for name in varied))
        members.setdefault(key, []).append(job)
    groups = [
        _group(dict(zip(SETUP, key, strict=False)), dict(zip(varied, key[len(SETUP) :], strict=True)), group)
        for key, group in members.items()
    ]
    for group in groups:
        group["speedup_over_sequential"] = _speedup(group, groups)
    errors = {
        "iteration_s": _spread(group["prediction_error"] for group in groups),
        "speedup_over_sequential": _spread(
            None if (of := quotient(both["measured"], both["predicted"])) is None else of - 1.0
            for group in groups
            if group["strategy"] != "sequential" and (both := group["speedup_over_sequential"])
        ),
    }
    return finite({"num_jobs": len(jobs), "counts": _counts(jobs), "errors": errors, "groups": groups})


def _spread(values: Iterable[float | None]) -> dict[str, float | None]:
    """Median and largest of absolute values."""
    known = [abs(value) for value in values if value is not None]
    return {"median": statistics.median(known) if known else None, "max": max(known, default=None)}


def _counts(jobs: Sequence[SweepJob]) -> dict[str, int]:
    ends = [job.result.get("status") for job in jobs]
    ok, infeasible = ends.count("ok"), ends.count("infeasible")
    return {"ok": ok, "infeasible": infeasible, "failed": len(jobs) - ok - infeasible}


def _group(setup: dict[str, Any], settings: dict[str, str | None], jobs: list[SweepJob]) -> dict[str, Any]:
    out: dict[str, Any] = {**setup, "overrides": settings, "counts": _counts(jobs), "jobs": [job.name for job in jobs]}
    for source in SOURCES:
        parts = [job.result[source] for job in jobs if job.ok and isinstance(job.result.get(source), dict)]
        medians: dict[str, float | None] = {name: _median(part.get(name) for part in parts) for name in MEDIANS}
        medians["peak_memory_bytes"] = _median(
            max(numbers((part.get("peak_memory_bytes") or {}).values()), default=None) for part in parts
        )
        out[source] = medians if parts else None
    out["prediction_error"] = _median(job.result.get("prediction_error") for job in jobs if job.ok)
    reasons = [str(job.result.get("reason")) for job in jobs if not job.ok and job.result.get("reason")]
    out["reason"] = reasons[0] if reasons else None
    return out


def _median(values: Iterable[Any]) -> float | None:
    known = numbers(values)
    return statistics.median(known) if known else None


def _speedup(group: dict[str, Any], groups: list[dict[str, Any]]) -> dict[str, float | None]:
    chains = [
        g for g in groups if g["strategy"] == "sequential" and all(g[k] == group[k] for k in ("model", "cluster", "overrides"))
    ]
    same = [g for g in chains if g["engine"] == group["engine"]]
    base = (same or chains or [{}])[0]
    return {
        source: quotient((base.get(source) or {}).get("iteration_s"), (group[source] or {}).get("iteration_s"))
        for source in SOURCES
    }


def write_sweep(
    directory: Path | str,
    asked: Sequence[AskedJob],
    title: str = "",
    figures: Sequence[SweepFigure] = (),
    why: str = "",
) -> list[SweepJob]:
    """Write jobs.json, results.csv, summary.json, report.html and the figures' SVGs into a sweep directory.

    Args:
        asked: the sweep's jobs, in order.
        why: see `read_jobs`.
        title: heading of the page; the directory's name by default.
        figures: drawn in this order; the first is figure.svg, the second figure_2.svg.

    Returns:
        The jobs, in the order of the rows.
    """
    directory = Path(directory)
    found = read_jobs(directory, asked, why)
    drawn = [figure.evaluate(found) for figure in figures]
    summary = summarise(found)
    if drawn:
        summary["figures"] = finite([data.summary() for data in drawn])
    write_json(directory / "jobs.json", [asdict(job) for job in asked])
    write_text(directory / "results.csv", results_csv(found))
    write_json(directory / "summary.json", summary)
    for n, data in enumerate(drawn, start=1):
        if svg := figure_svg(data):
            write_text(directory / ("figure.svg" if n == 1 else f"figure_{n}.svg"), standalone(svg))
    write_text(directory / "report.html", sweep_report(found, summary, title or directory.resolve().name, drawn))
    return found
