"""A sweep's figure: panels of lines, bars or sorted values, in which a paper's numbers are hollow and dashed; and its table."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

from gpp.report.draw import text
from gpp.report.draw.page import Cell, Column, PageTable
from gpp.report.draw.palette import INK, MUTED, PAGE, RULE, tone
from gpp.report.draw.svg import Drawing, Swatch, element, label, line, picture, rect, swatch, tick_label, ticks, tooltip
from gpp.report.sweep.figure import ALL, FigureData, FigurePoint, Key, Range, SweepFigure, middle

WIDTH, HEIGHT = 440.0, 280.0
LEFT, RIGHT, HEAD, FOOT = 66.0, 14.0, 30.0, 46.0
PER_ROW = 3
HEADING = 26.0
LEGEND = 26.0


class Scale(NamedTuple):
    """A numeric axis: values low..high laid out from pixel `start` to pixel `end`."""

    low: float
    high: float
    start: float
    end: float
    log: bool

    def at(self, value: float) -> float:
        low, high, value = (math.log(max(v, 1e-300)) if self.log else v for v in (self.low, self.high, value))
        return self.start + (self.end - self.start) * ((value - low) / (high - low) if high > low else 0.5)


def figure_svg(data: FigureData) -> Drawing:
    """The whole figure as one drawing, a file of its own; empty if no job has a value."""
    panels = _panels(data)
    if not panels:
        return Drawing()
    columns = min(PER_ROW, len(panels))
    legend, needed = _legend(data, HEADING + 4)
    needed = max(needed, 16 + 8.4 * len(data.figure.title))
    wide = max(WIDTH, needed / columns, _bars_width(data, panels) if data.figure.chart == "bars" else 0.0)
    rows = -(-len(panels) // columns)
    width, height = columns * wide, HEADING + LEGEND + rows * HEIGHT
    body = [label(8, 18, data.figure.title, 14, INK, font_weight="600"), *legend]
    for n, panel in enumerate(panels):
        x, y = n % columns * wide, HEADING + LEGEND + n // columns * HEIGHT
        body.append(element("g", "".join(_panel(data, panel, wide)), transform=f"translate({x:.0f} {y:.0f})"))
    return picture(width, height, body, data.figure.title)


def figure_panels(data: FigureData) -> list[Drawing]:
    """The panels as drawings of their own, which a page puts side by side as its width allows."""
    panels = _panels(data)
    wide = max(WIDTH, _bars_width(data, panels) if data.figure.chart == "bars" and panels else 0.0)
    return [picture(wide, HEIGHT, _panel(data, panel, wide), f"{data.figure.title}, {panel}".rstrip(", ")) for panel in panels]


def figure_swatches(data: FigureData) -> list[Swatch]:
    """The legend of the panels: a colour for each series, and what is hollow or dashed."""
    out = [swatch(name, rect(0.5, 0.5, 25, 11, tone(n).mid, stroke=tone(n).strong)) for n, name in enumerate(data.series)]
    if data.published:
        marks = [line(0, 6, 26, 6, MUTED, 1.6, stroke_dasharray="4 3")]
        if data.figure.chart == "lines":
            marks.append(_dot(13, 6, PAGE, MUTED, ""))
        out.append(swatch(_published_words(data), *marks))
    return out


def _published_words(data: FigureData) -> str:
    return f"{data.figure.reference}{f': {data.figure.source}' if data.figure.source else ''}"


def _panels(data: FigureData) -> list[str]:
    """The panels in which some job has a value."""
    known = {key.panel for key, point in data.points.items() if point.value is not None}
    return [panel for panel in data.panels if panel in known]


def shown(figure: SweepFigure) -> Callable[[float | None], str]:
    """The way in which the figure's values are written."""
    if figure.normalise or figure.multiple_of:
        return text.ratio
    if figure.y.endswith("_s") and "_per_s" not in figure.y:
        return text.seconds
    if figure.y.removesuffix(".max").endswith("_bytes"):
        return text.num_bytes
    return text.percent if figure.y.endswith("accuracy") else text.significant


def place_words(figure: SweepFigure, place: str) -> str:
    """A place on the horizontal axis, as it is read."""
    return text.num_bytes(float(place)) if figure.x.endswith("_bytes") else place


def written(figure: SweepFigure, point: FigurePoint) -> str:
    """A point's value, with its deviation where it has one; without a value, how its jobs ended."""
    show = shown(figure)
    if point.value is None:
        return point.status
    return show(point.value) + (f" ± {show(point.deviation)}" if point.deviation is not None else "")


def _legend(data: FigureData, y: float) -> tuple[list[str], float]:
    """The legend of colours and dashes, and its width."""
    out, x = [], 8.0
    for n, name in enumerate(data.series):
        out += [rect(x, y, 14, 11, tone(n).mid, stroke=tone(n).strong), label(x + 19, y + 9.5, name, 11.5, INK)]
        x += 40 + 6.8 * len(name)
    if data.published:
        marks = [line(x, y + 5.5, x + 22, y + 5.5, MUTED, 1.6, stroke_dasharray="4 3")]
        if data.figure.chart == "lines":
            marks.append(element("circle", cx=x + 11, cy=y + 5.5, r=3.2, fill=PAGE, stroke=MUTED, stroke_width=1.4))
        words = _published_words(data)
        out += [*marks, label(x + 28, y + 9.5, words, 11.5, INK)]
        x += 40 + 6.4 * len(words)
    return out, x


def _panel(data: FigureData, panel: str, width: float) -> list[str]:
    figure, places = data.figure, data.places(panel)
    y = _y_scale(data, panel)
    out = _y_axis(figure, y, width)
    y_name, middle = figure.y_name or figure.y, (LEFT + width - RIGHT) / 2
    out.append(label(8, 16, y_name, 11, MUTED))
    if panel != ALL:
        room = middle - 3.9 * len(panel) > 16 + 6.2 * len(y_name)
        x, anchor = (middle, "middle") if room else (width - RIGHT, "end")
        out.append(label(x, 16, panel, 12.5, INK, anchor, font_weight="600"))
    out.append(label(width - RIGHT, HEIGHT - 8, figure.x_name or figure.x, 11, MUTED, "end"))
    if (figure.normalise or figure.multiple_of) and y.low < 1 < y.high:
        out.append(line(LEFT, y.at(1), width - RIGHT, y.at(1), MUTED, 1.4))
    draw = {"lines": _lines, "bars": _bars, "sorted": _sorted}[figure.chart]
    return out + draw(data, panel, places, y, width)


def _values(data: FigureData, panel: str) -> list[float]:
    points = [point for key, point in data.points.items() if key.panel == panel]
    own = [point.value + (point.deviation or 0.0) for point in points if point.value is not None]
    own += [point.value for point in points if point.value is not None]
    return own + [value for key, pair in data.published.items() if key.panel == panel for value in pair]


def _y_scale(data: FigureData, panel: str) -> Scale:
    values = [v for v in _values(data, panel) if v > 0] or [1.0]
    top, bottom = HEAD, HEIGHT - FOOT
    if data.figure.y_scale == "log":
        return Scale(10 ** math.floor(math.log10(min(values))), 10 ** math.ceil(math.log10(max(values) * 1.05)), bottom, top, True)
    low = 0.9 * min(values) if data.figure.chart == "sorted" else 0.0
    return Scale(low, max(values) * 1.08, bottom, top, False)


def _y_axis(figure: SweepFigure, y: Scale, width: float) -> list[str]:
    if y.log:
        decades = range(round(math.log10(y.low)), round(math.log10(y.high)) + 1)
        marks = [
            10.0**d * m
            for d in decades
            for m in ((1,) if len(decades) > 3 else (1, 2, 5))
            if y.low <= 10.0**d * m <= y.high * 1.001
        ]
    else:
        marks = ticks(y.low, y.high, 5)
    show, step = shown(figure), marks[1] - marks[0] if len(marks) > 1 else 1.0
    out = []
    for mark in marks:
        words = show(mark) if y.log or show in (text.seconds, text.num_bytes, text.percent) else tick_label(mark, step)
        words += "×" if show is text.ratio and not y.log else ""
        out.append(line(LEFT, y.at(mark), width - RIGHT, y.at(mark), RULE))
        out.append(label(LEFT - 6, y.at(mark) + 3.6, "0" if mark == 0 else words, 10.5, MUTED, "end"))
    return out


def _x_positions(figure: SweepFigure, places: Sequence[str], width: float) -> dict[str, float]:
    """Numbers on their scale; other places evenly spaced."""
    start, end = LEFT + 16, width - RIGHT - 16
    try:
        numbers = [float(place) for place in places]
    except ValueError:
        numbers = [float(i) for i in range(len(places))]
    log = figure.x_scale == "log" and min(numbers, default=0) > 0
    scale = Scale(min(numbers, default=0), max(numbers, default=1), start, end, log)
    return {place: scale.at(number) for place, number in zip(places, numbers, strict=True)}


def _lines(data: FigureData, panel: str, places: Sequence[str], y: Scale, width: float) -> list[str]:
    at = _x_positions(data.figure, places, width)
    base = HEIGHT - FOOT
    out = [label(x, base + 16, place_words(data.figure, place), 10.5, MUTED, "middle") for place, x in at.items()]
    for n, name in enumerate(data.series):
        printed = [(at[x], data.published[key]) for x in places if (key := Key(panel, name, x)) in data.published]
        out += _published_line(printed, y, tone(n).strong)
    missing: dict[str, int] = {}
    for n, name in reversed(list(enumerate(data.series))):
        colour = tone(n).strong
        own = [(x, v) for x in places if (v := data.value(panel, name, x)) is not None and v > 0]
        if len(own) > 1:
            path = "M" + "L".join(f"{at[x]:.1f} {y.at(v):.1f}" for x, v in own)
            out.append(element("path", d=path, fill="none", stroke=colour, stroke_width=1.8 + 0.8 * n, stroke_linejoin="round"))
        for x, v in own:
            point = data.points[Key(panel, name, x)]
            out += _whisker(at[x], point, y, colour)
            out.append(_dot(at[x], y.at(v), colour, colour, f"{name} at {x}: {written(data.figure, point)}"))
        for x in places:
            point = data.points.get(Key(panel, name, x))
            if point and point.value is None:
                up = missing[x] = missing.get(x, 0) + 1
                out.append(
                    label(at[x], base - 4 - 12 * (up - 1), "×", 13, colour, "middle", title=f"{name} at {x}: {point.status}")
                )
    return out


def _published_line(printed: Sequence[tuple[float, Range]], y: Scale, colour: str) -> list[str]:
    out = []
    middles = [(x, middle(pair)) for x, pair in printed]
    if len(middles) > 1:
        path = "M" + "L".join(f"{x:.1f} {y.at(v):.1f}" for x, v in middles)
        out.append(element("path", d=path, fill="none", stroke=colour, stroke_width=1.3, stroke_dasharray="5 4", opacity=0.8))
    for x, (low, high) in printed:
        words = f"published: {text.significant(low)}" + (f" to {text.significant(high)}" if high > low else "")
        if high > low:
            out.append(line(x, y.at(low), x, y.at(high), colour, 1.6))
        out.append(_dot(x, y.at(middle((low, high))), PAGE, colour, words))
    return out


def _dot(x: float, y: float, fill: str, stroke: str, title: str) -> str:
    return element("circle", tooltip(title), cx=x, cy=y, r=3.4, fill=fill, stroke=stroke, stroke_width=1.4)


def _bars_width(data: FigureData, panels: Sequence[str]) -> float:
    return LEFT + RIGHT + 44.0 * len(data.series) * max(len(data.places(panel)) for panel in panels)


def _bars(data: FigureData, panel: str, places: Sequence[str], y: Scale, width: float) -> list[str]:
    base, show = HEIGHT - FOOT, shown(data.figure)
    slot = (width - LEFT - RIGHT) / max(1, len(places))
    bar = min(46.0, slot * 0.82 / max(1, len(data.series)))
    out = []
    for g, place in enumerate(places):
        centre = LEFT + slot * (g + 0.5)
        out.append(label(centre, base + 16, place, 11, INK, "middle"))
        for n, name in enumerate(data.series):
            x, key = centre + (n - len(data.series) / 2) * bar, Key(panel, name, place)
            point, printed = data.points.get(key), data.published.get(key)
            if point and point.value is not None:
                top = y.at(point.value)
                words = f"{name} at {place}: {written(data.figure, point)}"
                out.append(rect(x + 1.5, top, bar - 3, base - top, tone(n).mid, words))
                out += _whisker(x + bar / 2, point, y, INK)
                top = y.at(point.value + (point.deviation or 0.0))
                highest = min(top, y.at(printed[1])) if printed and y.at(printed[1]) > top - 14 else top
                out.append(label(x + bar / 2, highest - 4, show(point.value), 10, INK, "middle"))
            elif point:
                out.append(
                    label(x + bar / 2, base - 4, "×", 13, tone(n).strong, "middle", title=f"{name} at {place}: {point.status}")
                )
            if printed:
                out += _published_bar(x, bar, printed, y)
    return out


def _whisker(x: float, point: FigurePoint, y: Scale, colour: str) -> list[str]:
    """A deviation to either side of a value, within the picture."""
    if point.value is None or point.deviation is None:
        return []
    low, high = y.at(max(point.value - point.deviation, y.low)), y.at(point.value + point.deviation)
    across = [line(x - 4, at, x + 4, at, colour, 1.2) for at in (low, high)]
    return [line(x, low, x, high, colour, 1.2), *across]


def _published_bar(x: float, bar: float, printed: Range, y: Scale) -> list[str]:
    low, high = (y.at(value) for value in printed)
    dashes = {"stroke_dasharray": "4 3"}
    if high == low:
        return [line(x - 1, low, x + bar + 1, low, INK, 1.8, **dashes)]
    return [rect(x + 0.5, high, bar - 1, low - high, "none", "published", stroke=INK, stroke_width=1.4, **dashes)]


def _sorted(data: FigureData, panel: str, places: Sequence[str], y: Scale, width: float) -> list[str]:
    out, base = [], HEIGHT - FOOT
    across = Scale(0.0, 100.0, LEFT, width - RIGHT, False)
    for mark in (0, 25, 50, 75, 100):
        out.append(label(min(across.at(mark), width - 18), base + 16, f"{mark} %", 10.5, MUTED, "middle"))
    for n, name in reversed(list(enumerate(data.series))):
        values = sorted(v for x in places if (v := data.value(panel, name, x)) is not None and v > 0)
        if values:
            step = 100.0 / len(values)
            path = "M" + "L".join(f"{across.at(step * (i + 0.5)):.1f} {y.at(v):.1f}" for i, v in enumerate(values))
            out.append(element("path", d=path, fill="none", stroke=tone(n).strong, stroke_width=1.8 + 0.8 * n))
    return out


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
    columns += [Column(figure.series), Column("values", "n"), *(Column(name, "n") for name, _ in QUANTILES)]
    rows = []
    for panel in data.panels:
        for name in data.series:
            values = sorted(v for x in data.places(panel) if (v := data.value(panel, name, x)) is not None)
            # The sorted value that is nearest to a quantile.
            found = [
                statistics.median(values) if q == 0.5 else values[round(q * (len(values) - 1))] for _, q in QUANTILES if values
            ]
            quantiles = map(show, found) if values else "–" * len(QUANTILES)
            rows.append([*([panel] if panel != ALL else []), name, str(len(values)), *quantiles])
    return PageTable(columns=columns, rows=rows)
