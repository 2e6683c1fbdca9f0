"""report.html of a sweep: what was compared, the pictures, every job."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any
from urllib.parse import quote

from gpp.report import text
from gpp.report.charts import grouped_bars, line_chart
from gpp.report.jobs import Job
from gpp.report.page import Column, Html, link, page, scroll, section, status_mark, table
from gpp.report.palette import MEASURED, PREDICTED, tone
from gpp.report.sweep_figure import FigureData
from gpp.report.sweep_figure_table import figure_section


def sweep_report(jobs: Sequence[Job], summary: dict[str, Any], title: str, figures: Sequence[FigureData] = ()) -> str:
    """The page of a sweep, whatever its jobs' ends; self-contained HTML.

    Args:
        summary: of the same jobs, as `gpp.report.sweep.summarise` makes it.
        figures: what the sweep is about; with them the general pictures, which know nothing of its question, are left out.
    """
    counts = summary["counts"]
    words = " ".join(f"<span>{name} <b>{counts[name]}</b></span>" for name in ("ok", "infeasible", "failed"))
    parts = [f'<h1>{escape(title)}</h1><p class="sub"><span>jobs <b>{summary["num_jobs"]}</b></span> {words}</p>']
    parts += [section(data.figure.title, figure_section(data)) for data in figures]
    if not figures:
        parts.append(section("Iteration time by strategy", _bars(summary["groups"])))
        parts.append(section("Throughput by number of devices", _scaling(jobs)))
    parts.append(section("Medians", _medians(summary["groups"])))
    parts.append(section("Jobs", _jobs(jobs)))
    files = " · ".join(link(name, name) for name in ("results.csv", "summary.json"))
    return page(title, "".join(parts) + f'<p class="sub">Beside this page: {files}</p>')


def _panel_name(group: dict[str, Any]) -> tuple[str, ...]:
    settings = [f"{key}={value}" for key, value in group["overrides"].items() if value is not None]
    return (str(group["model"]), str(group["cluster"]), *settings)


def _bars(groups: Sequence[dict[str, Any]]) -> str:
    panels: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for group in groups:
        panels.setdefault(_panel_name(group), []).append(group)
    out = []
    for name, members in panels.items():
        if len(panels) > 24 and all(g["predicted"] is None and g["measured"] is None for g in members):
            continue
        engines = {g["engine"] for g in members if g["engine"] is not None}
        labels = [
            str(g["strategy"]) if len(engines) < 2 or g["engine"] is None else f"{g['strategy']} ({g['engine']})" for g in members
        ]
        series = [
            (source, fill, [(g[source] or {}).get("iteration_s") for g in members])
            for source, fill in (("predicted", PREDICTED), ("measured", MEASURED))
        ]
        series = [entry for entry in series if any(v is not None for v in entry[2])] or series[:1]
        notes = ["infeasible" if g["counts"]["infeasible"] else "failed" for g in members]
        chart = grouped_bars(
            labels,
            series,
            text.seconds,
            title=f"Iteration time, {' '.join(name)}",
            height=210,
            notes=notes,
            width=max(330.0, min(1320.0, 76 + 92.0 * len(members))),
        )
        out.append(f'<div><h3 style="margin:10px 0 2px;font-size:14px">{escape(" · ".join(name))}</h3>{scroll(chart)}</div>')
    wide = max((len(members) for members in panels.values()), default=0) > 4
    return "".join(out) if wide else f'<div class="pair">{"".join(out)}</div>' if out else ""


def _scaling(jobs: Sequence[Job]) -> str:
    """For every model a line for each strategy, where a strategy ran on several numbers of devices."""
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
            (strategy, tone(n).dark, [(float(d), max(values)) for d, values in sorted(by_devices.items())])
            for n, (strategy, by_devices) in enumerate(lines.items())
        ]
        chart = line_chart(series, title=f"Throughput of {model} by devices", x_name="devices", points=True, from_zero=True)
        out.append(
            f'<div><h3 style="margin:10px 0 2px;font-size:14px">{escape(model)}, samples per second</h3>{scroll(chart)}</div>'
        )
    return f'<div class="pair">{"".join(out)}</div>' if out else ""


def _medians(groups: Sequence[dict[str, Any]]) -> str:
    settings = list(dict.fromkeys(key for group in groups for key in group["overrides"]))
    columns = [Column(name=name) for name in ("model", "strategy", "cluster", "engine", *settings)]
    columns += [
        Column(name=name, kind="n")
        for name in (
            "predicted",
            "measured",
            "measured / predicted",
            "speed-up over sequential",
            "bubble",
            "peak memory",
            "ok jobs",
        )
    ]
    rows = []
    for group in groups:
        predicted, measured = group["predicted"] or {}, group["measured"] or {}
        best, faster, counts = measured or predicted, group["speedup_over_sequential"], group["counts"]
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
                _ends(counts),
            ]
        )
    return table(columns, rows)


def _ends(counts: dict[str, int]) -> str:
    bad = ", ".join(f"{counts[name]} {name}" for name in ("infeasible", "failed") if counts[name])
    return f"{counts['ok']} of {sum(counts.values())}" + (f" ({bad})" if bad else "")


def _jobs(jobs: Sequence[Job]) -> str:
    columns = [
        Column(name="job"),
        Column(name="overrides", kind="c"),
        Column(name="status"),
        Column(name="predicted", kind="n"),
        Column(name="measured", kind="n"),
        Column(name="last loss", kind="n"),
        Column(name="reason"),
    ]
    rows = []
    for job in jobs:
        result = job.result
        predicted, measured = result.get("predicted") or {}, result.get("measured") or {}
        name = link(f"{quote(job.name)}/report.html", job.name) if job.has_report else job.name
        losses = [v for v in result.get("loss") or [] if v is not None]
        overrides = " ".join(f"{key}={value}" for key, value in job.overrides.items())
        rows.append(
            [
                name,
                overrides,
                status_mark(str(result.get("status"))),
                text.seconds(predicted.get("iteration_s")),
                text.seconds(measured.get("iteration_s")),
                text.significant(losses[-1], 4) if losses else "–",
                _reason(result),
            ]
        )
    return table(columns, rows)


def _reason(result: dict[str, Any]) -> str:
    """The first line; the rest unfolds."""
    lines = str(result.get("reason") or "").strip().splitlines()
    if len(lines) < 2:
        return lines[0] if lines else ""
    return Html(f"<details><summary>{escape(lines[0])}</summary><pre>{escape(chr(10).join(lines[1:]))}</pre></details>")
