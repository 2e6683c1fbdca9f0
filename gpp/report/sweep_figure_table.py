"""The table beside a sweep's figure: our number, the published one, their ratio."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from html import escape

from gpp.report import text
from gpp.report.page import Column, Html, bullets, scroll, table
from gpp.report.sweep_figure import ALL, FigureData, Key, middle
from gpp.report.sweep_figure_chart import figure_svg, shown, written

QUANTILES = (("least", 0.0), ("5 %", 0.05), ("median", 0.5), ("95 %", 0.95), ("greatest", 1.0))


def figure_section(data: FigureData) -> str:
    """Picture, table and notes of a figure as HTML; nothing where no job has a value."""
    svg = figure_svg(data, heading=False)
    if not svg:
        return ""
    rows = _distribution(data) if data.figure.chart == "sorted" else _places(data)
    return scroll(svg) + rows + bullets(list(data.figure.notes))


def _places(data: FigureData) -> str:
    figure = data.figure
    gains = {(gain.panel, gain.x): gain for gain in data.gains}
    columns = [Column(name=", ".join(figure.panel_columns))] if figure.panel else []
    columns += [Column(name=figure.x_name or figure.x, kind="n"), *(Column(name=name, kind="n") for name in data.series)]
    if figure.gain:
        columns.append(Column(name=f"{figure.gain} / best of {', '.join(figure.over)}", kind="n"))
    rows = []
    for panel in data.panels:
        for x in data.places(panel):
            row: list[str] = [panel] if figure.panel else []
            row += [x, *(_cell(data, Key(panel, name, x)) for name in data.series)]
            if figure.gain:
                gain = gains[panel, x]
                row.append(
                    _below(text.ratio(gain.ours), None if gain.published is None else f"published {text.ratio(gain.published)}")
                )
            rows.append(row)
    return table(columns, rows)


def _cell(data: FigureData, key: Key) -> str:
    show, point, printed = shown(data.figure), data.points.get(key), data.published.get(key)
    value = point.value if point else None
    own = written(data.figure, point) if point else "–"
    if printed is None:
        return own
    words = show(printed[0]) if printed[0] == printed[1] else f"{show(printed[0])} to {show(printed[1])}"
    share = text.quotient(value, middle(printed))
    # Beside a paper's number stands ours; beside a bound that all are measured by, how far each is from it.
    beside = "ours" if data.figure.reference == "published" else "measured by it"
    return _below(own, f"{data.figure.reference} {words}" + (f", {beside} {text.ratio(share)}" if share is not None else ""))


def _below(own: str, small: str | None) -> str:
    """Our number, and in small print below it the published one."""
    return own if small is None else Html(f'{escape(own)}<br/><span style="color:#4b5563;font-size:12px">{escape(small)}</span>')


def _distribution(data: FigureData) -> str:
    """One row a series: how its values are spread over the places."""
    figure, show = data.figure, shown(data.figure)
    columns = [Column(name=", ".join(figure.panel_columns))] if figure.panel else []
    columns += [
        Column(name=figure.series),
        Column(name="values", kind="n"),
        *(Column(name=name, kind="n") for name, _ in QUANTILES),
    ]
    rows = []
    for panel in data.panels:
        for name in data.series:
            values = sorted(v for x in data.places(panel) if (v := data.value(panel, name, x)) is not None)
            quantiles = [show(_quantile(values, share)) if values else "–" for _, share in QUANTILES]
            rows.append([*([panel] if panel != ALL else []), name, str(len(values)), *quantiles])
    return table(columns, rows)


def _quantile(values: Sequence[float], share: float) -> float:
    """Of sorted values: the nearest one."""
    return statistics.median(values) if share == 0.5 else values[round(share * (len(values) - 1))]
