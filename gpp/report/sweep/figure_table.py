"""The table beside a sweep's figure: our number, the published one, their ratio."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from gpp.report.draw import text
from gpp.report.draw.page import Cell, Column, PageTable
from gpp.report.sweep.figure import ALL, FigureData, Key, middle
from gpp.report.sweep.figure_chart import place_words, shown, written

QUANTILES = (("least", 0.0), ("5 %", 0.05), ("median", 0.5), ("95 %", 0.95), ("greatest", 1.0))


def figure_table(data: FigureData) -> PageTable:
    """Every number of a figure; a distribution has its quantiles."""
    return _distribution(data) if data.figure.chart == "sorted" else _places(data)


def _places(data: FigureData) -> PageTable:
    figure = data.figure
    gains = {(gain.panel, gain.x): gain for gain in data.gains}
    columns = [Column(name=", ".join(figure.panel_columns))] if figure.panel else []
    columns += [Column(name=figure.x_name or figure.x, kind="n"), *(Column(name=name, kind="n") for name in data.series)]
    if figure.gain:
        columns.append(Column(name=f"{figure.gain} / best of {', '.join(figure.over)}", kind="n"))
    rows = []
    for panel in data.panels:
        for x in data.places(panel):
            row: list[str | Cell] = [panel] if figure.panel else []
            row += [place_words(figure, x), *(_cell(data, Key(panel, name, x)) for name in data.series)]
            if figure.gain:
                gain = gains[panel, x]
                printed = "" if gain.published is None else f"published {text.ratio(gain.published)}"
                row.append(Cell(text=text.ratio(gain.ours), small=printed))
            rows.append(row)
        show = shown(figure)
        for kind in figure.totals:
            row = [panel] if figure.panel else []
            row += [kind, *(show(data.total(panel, name, kind)) for name in data.series)]
            rows.append(row + [""] * (len(columns) - len(row)))
    return PageTable(columns=columns, rows=rows)


def _cell(data: FigureData, key: Key) -> str | Cell:
    """Our number, and in small print below it the published one."""
    show, point, printed = shown(data.figure), data.points.get(key), data.published.get(key)
    value = point.value if point else None
    own = written(data.figure, point) if point else "–"
    if printed is None:
        return own
    words = show(printed[0]) if printed[0] == printed[1] else f"{show(printed[0])} to {show(printed[1])}"
    share = text.quotient(value, middle(printed))
    # A published number is shown with the ratio of ours to it; a bound is shown with each series' ratio to it.
    beside = "ours" if data.figure.reference == "published" else "measured by it"
    small = f"{data.figure.reference} {words}" + (f", {beside} {text.ratio(share)}" if share is not None else "")
    return Cell(text=own, small=small)


def _distribution(data: FigureData) -> PageTable:
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
    return PageTable(columns=columns, rows=rows)


def _quantile(values: Sequence[float], share: float) -> float:
    """The sorted value that is nearest to the quantile."""
    return statistics.median(values) if share == 0.5 else values[round(share * (len(values) - 1))]
