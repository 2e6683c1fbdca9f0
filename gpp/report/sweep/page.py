"""report.html of a sweep: charts, medians, every job."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple
from urllib.parse import quote

from gpp.report.draw import text
from gpp.report.draw.charts import grouped_bars, line_chart
from gpp.report.draw.page import Cell, Column, PageTable, render
from gpp.report.draw.palette import MEASURED, PREDICTED, tone
from gpp.report.draw.svg import Drawing
from gpp.report.sweep.figure import FigureData
from gpp.report.sweep.figure_chart import figure_panels, figure_swatches, figure_table
from gpp.report.sweep.jobs import SweepJob, source_of

MANY_PANELS = 24
"""Number of charts above which charts without a bar are left out."""


class Panel(NamedTuple):
    """A chart and its heading."""

    heading: str
    chart: Drawing


def sweep_report(jobs: Sequence[SweepJob], summary: dict[str, Any], title: str, figures: Sequence[FigureData] = ()) -> str:
    """The page of a sweep; self-contained HTML, also where jobs failed.

    Args:
        summary: the summary of the same jobs, as `gpp.report.sweep.files.summarise` makes it.
        figures: the sweep's own figures, which take the place of the general charts.
    """
    counts = summary["counts"]
    bars, wide = ([], False) if figures else _bars(summary["groups"])
    return render(
        "sweep.html",
        title=title,
        facts=[("jobs", summary["num_jobs"]), *((name, counts[name]) for name in ("ok", "infeasible", "failed"))],
        figures=[_figure(data) for data in figures],
        bars=bars,
        wide_bars=wide,
        scaling=[] if figures else _scaling(jobs),
        medians=_medians(summary["groups"]),
        jobs=_jobs(jobs),
        files=[("results.csv", ""), ("summary.json", "")],
    )


def general_charts(jobs: Sequence[SweepJob], groups: Sequence[dict[str, Any]]) -> list[Panel]:
    """The charts of a sweep that declares no figures."""
    return [*_bars(groups)[0], *_scaling(jobs)]


def _figure(data: FigureData) -> dict[str, Any]:
    """A figure with its table and notes; it has no panels where no job has a value."""
    return {
        "title": data.figure.title,
        "panels": figure_panels(data),
        "swatches": figure_swatches(data),
        "table": figure_table(data),
        "notes": data.figure.notes,
    }


def _bars(groups: Sequence[dict[str, Any]]) -> tuple[list[Panel], bool]:
    """A chart for every setting, and whether they need the page's whole width."""
    panels: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for group in groups:
        settings = [f"{key}={value}" for key, value in group["overrides"].items() if value is not None]
        panels.setdefault((str(group["model"]), str(group["cluster"]), *settings), []).append(group)
    out = []
    for name, members in panels.items():
        if len(panels) > MANY_PANELS and all(g["predicted"] is None and g["measured"] is None for g in members):
            continue
        series = [
            (words, fill, [(g[half] or {}).get("iteration_s") for g in members])
            for half, words, fill in (("predicted", "predicted", PREDICTED), ("measured", source_of(members), MEASURED))
        ]
        series = [entry for entry in series if any(v is not None for v in entry[2])] or series[:1]
        # The strategies, each with its engine where engines differ.
        several = len({g["engine"] for g in members if g["engine"] is not None}) > 1
        names = [f"{g['strategy']} ({g['engine']})" if several and g["engine"] is not None else str(g["strategy"]) for g in members]
        chart = grouped_bars(
            names,
            series,
            text.seconds,
            title=f"Iteration time, {' '.join(name)}",
            notes=["infeasible" if g["counts"]["infeasible"] else "failed" for g in members],
            size=(max(330.0, min(1320.0, 76 + 92.0 * len(members))), 210.0),
        )
        out.append(Panel(heading=" · ".join(name), chart=chart))
    return out, max((len(members) for members in panels.values()), default=0) > 4


def _scaling(jobs: Sequence[SweepJob]) -> list[Panel]:
    """A chart for every model that ran on several numbers of devices, with a line for each strategy."""
    points: dict[str, dict[str, dict[int, list[float]]]] = {}
    for job in jobs:
        best = job.result.get("measured") or job.result.get("predicted")
        devices = (job.result.get("plan") or {}).get("num_devices")
        if job.ok and best and devices and best.get("throughput_samples_per_s") is not None:
            lines = points.setdefault(str(job.result["model"]), {})
            lines.setdefault(str(job.result["strategy"]), {}).setdefault(int(devices), []).append(best["throughput_samples_per_s"])
    out = []
    for model, lines in points.items():
        if max(len(by_devices) for by_devices in lines.values()) < 2:
            continue
        series = [
            (strategy, tone(n).strong, [(float(d), max(values)) for d, values in sorted(by_devices.items())])
            for n, (strategy, by_devices) in enumerate(lines.items())
        ]
        chart = line_chart(series, title=f"Throughput of {model} by devices", x_name="devices", points=True, from_zero=True)
        out.append(Panel(heading=f"{model}, samples per second", chart=chart))
    return out


def _medians(groups: Sequence[dict[str, Any]]) -> PageTable:
    settings = list(dict.fromkeys(key for group in groups for key in group["overrides"]))
    columns = [Column(name=name) for name in ("model", "strategy", "cluster", "engine", *settings)]
    source = source_of(groups)
    medians = ("predicted", source, f"{source} / predicted", "speed-up over sequential", "bubble", "peak memory")
    columns += [*(Column(name=name, kind="n") for name in medians), Column(name="ok jobs")]
    rows = []
    for group in groups:
        predicted, measured = group["predicted"] or {}, group["measured"] or {}
        best, faster, counts = measured or predicted, group["speedup_over_sequential"], group["counts"]
        bad = ", ".join(f"{counts[name]} {name}" for name in ("infeasible", "failed") if counts[name])
        speedup = faster["measured"] if faster["measured"] is not None else faster["predicted"]
        rows.append(
            [
                *(str(group[name] or "–") for name in ("model", "strategy", "cluster", "engine")),
                *(str(group["overrides"].get(key) or "–") for key in settings),
                text.seconds(predicted.get("iteration_s")),
                text.seconds(measured.get("iteration_s")),
                text.ratio(text.quotient(measured.get("iteration_s"), predicted.get("iteration_s"))),
                text.ratio(speedup),
                text.percent(best.get("bubble_fraction")),
                text.num_bytes(best.get("peak_memory_bytes")),
                f"{counts['ok']} of {sum(counts.values())}" + (f" ({bad})" if bad else ""),
            ]
        )
    return PageTable(columns=columns, rows=rows)


def _jobs(jobs: Sequence[SweepJob]) -> PageTable:
    columns = [Column("job"), Column("overrides", "c"), Column("status"), Column("predicted", "n")]
    columns += [Column(source_of(job.result for job in jobs), "n"), Column("last loss", "n"), Column("reason")]
    rows = []
    for job in jobs:
        result = job.result
        predicted, measured = result.get("predicted") or {}, result.get("measured") or {}
        name = Cell(text=job.name, link=f"{quote(job.name)}/report.html") if job.has_report else job.name
        losses = [v for v in result.get("loss") or [] if v is not None]
        overrides = " ".join(f"{key}={value}" for key, value in job.overrides.items())
        first, *rest = str(result.get("reason") or "").strip().splitlines() or [""]
        rows.append(
            [
                name,
                overrides,
                Cell(text=str(result.get("status")), look="status"),
                text.seconds(predicted.get("iteration_s")),
                text.seconds(measured.get("iteration_s")),
                text.significant(losses[-1], 4) if losses else "–",
                Cell(text=first, more="\n".join(rest)) if rest else first,  # the lines behind the first unfold
            ]
        )
    return PageTable(columns=columns, rows=rows)
