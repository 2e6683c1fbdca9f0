"""Bars and lines."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gpp.report.draw import text
from gpp.report.draw.palette import INK, LIMIT, MUTED, PAGE, RULE, text_on
from gpp.report.draw.svg import Drawing, element, label, line, number, picture, rect, tick_label, ticks

Value = float | None
PAGE_WIDTH = 840.0
"""Pixels of a drawing across the page, of a window of 900 pixels."""
LIMIT_IN_SIGHT = 4.0
"""A limit at this multiple of the tallest bar, or above, would flatten the bars: it stays out of the picture."""


def grouped_bars(
    groups: Sequence[str],
    series: Sequence[tuple[str, str, Sequence[Value]]],
    show: Callable[[Value], str],
    *,
    title: str,
    size: tuple[float, float] = (PAGE_WIDTH, 230.0),
    limits: tuple[str, Sequence[Value]] = ("limit", ()),
    notes: Sequence[str] = (),
    stages: Sequence[str] = (),
) -> Drawing:
    """Upright bars side by side for every group.

    Args:
        groups: names along the axis.
        series: name, colour and one value for each group (None: no bar) of every series.
        show: a value as text.
        size: width, at most, and height in pixels.
        limits: name in the legend, and height of a line across each group; the legend alone has it from LIMIT_IN_SIGHT times the
            bars on, and the lowest beside the highest.
        notes: short text in place of the bars of a group that has none.
        stages: the stages that each group is about, for the links between drawings.
    """
    (width, height), (limit_name, heights) = size, limits
    known = [v for _, _, values in series for v in values if v is not None and math.isfinite(v)]
    top = max(known, default=0.0) or 1.0
    drawn = [v for v in heights if v is not None]
    low, limit = min(drawn, default=0.0), max(drawn, default=0.0)
    shown_limit = 0 < limit < LIMIT_IN_SIGHT * top
    high = max(top, limit if shown_limit else 0.0) * 1.08
    left, foot, head = 64.0, 34.0, 30.0
    slot = min((width - left - 8) / max(1, len(groups)), 190.0)
    frame = _BarFrame(
        base=height - foot,
        scale=(height - foot - head) / high,
        bar=min(34.0, slot * 0.76 / max(1, len(series))),
        unit=show(top).partition(" ")[2],
    )
    out = []
    for mark in ticks(0.0, high, 4) if known else [0.0]:
        y = frame.base - mark * frame.scale
        out.append(line(left, y, left + slot * len(groups), y, RULE if mark else MUTED))
        out.append(label(left - 6, y + 3.6, show(mark) if mark else "0", 10.5, MUTED, "end"))
    # Long names are cut where there are few groups; where there are many, some groups stand without.
    every = 1 if slot > 40 else math.ceil((6.3 * max(map(len, groups), default=0) + 8) / slot)
    for n, group in enumerate(groups):
        centre = left + slot * (n + 0.5)
        own = heights[n] if shown_limit and n < len(heights) else None
        bars = [(name, fill, values[n]) for name, fill, values in series]
        if n % every == 0:
            chars = max(2, int((max(slot, 40.0) if every == 1 else every * slot) / 6.3))
            words = text.shorten_end(group, chars)
            out.append(label(centre, frame.base + 15, words, 11, INK, "middle", title=group))
        shapes = "".join(_bars(group, bars, centre, frame, show, own))
        out.append(element("g", shapes, data_stage=stages[n]) if n < len(stages) else shapes)
        if all(value is None for *_, value in bars) and n < len(notes):
            out.append(label(centre, frame.base - 6, notes[n], 10.5, LIMIT, "middle"))
        if own is not None:
            y = frame.base - own * frame.scale
            out.append(line(centre - slot * 0.42, y, centre + slot * 0.42, y, LIMIT, 1.6, stroke_dasharray="5 3"))
    limit_words = f"{limit_name} {show(low)}{'' if show(low) == show(limit) else f' to {show(limit)}'}"
    legend, end = _bar_legend(series, left, limit_words if limit > 0 else "", shown_limit)
    return picture(max(left + slot * len(groups) + 8, end, 340.0), height, out + legend, title)


@dataclass(frozen=True, slots=True, kw_only=True)
class _BarFrame:
    """Pixels of a bar chart: the height of zero, the height of one unit, a bar's width; most values share `unit`."""

    base: float
    scale: float
    bar: float
    unit: str


def _bars(
    group: str,
    bars: Sequence[tuple[str, str, Value]],
    centre: float,
    frame: _BarFrame,
    show: Callable[[Value], str],
    limit: Value,
) -> list[str]:
    """The bars of one group, with their numbers where they are wide enough; bars are name, colour and value."""
    out = []
    for i, (name, fill, value) in enumerate(bars):
        if value is None or not math.isfinite(value):
            continue
        x, tall = centre + (i - len(bars) / 2) * frame.bar, value * frame.scale
        out.append(rect(x + 1, frame.base - tall, frame.bar - 2, tall, fill, f"{group}, {name}: {show(value)}"))
        if frame.bar >= 26:
            amount, _, unit = show(value).partition(" ")
            words = amount if unit == frame.unit else f"{amount} {unit}"
            # Above the bar; inside it where the limit's line would cross the number.
            inside = limit is not None and tall > 16 and abs(limit * frame.scale - tall - 8) < 9
            ink, y = (text_on(fill), 12) if inside else (INK, -4)
            # A line of the grid does not go through the number.
            around = {} if inside else {"stroke": PAGE, "stroke_width": 3.0, "paint_order": "stroke"}
            out.append(label(x + frame.bar / 2, frame.base - tall + y, words, 10, ink, "middle", **around))
    return out


def _bar_legend(
    series: Sequence[tuple[str, str, Sequence[Value]]], left: float, limit: str, shown: bool
) -> tuple[list[str], float]:
    """The legend above the bars, and the pixel at which it ends."""
    out, x = [], left
    for name, fill, _ in series:
        out += [rect(x, 4, 14, 11, fill), label(x + 19, 13.5, name, 11)]
        x += 40 + 6.4 * len(name)
    if limit:
        words = limit if shown else f"{limit}, far above this scale"
        out += [line(x, 9.5, x + 18, 9.5, LIMIT, 1.6, stroke_dasharray="5 3"), label(x + 23, 13.5, words, 11)]
        x += 23 + 6.4 * len(words)
    return out, x


def line_chart(
    series: Sequence[tuple[str, str, Sequence[tuple[float, float]]]],
    *,
    title: str,
    x_name: str = "step",
    x_show: Callable[[Value], str] | None = None,
    points: bool = False,
    from_zero: bool = False,
) -> Drawing:
    """Lines over a common x axis; empty without a finite value.

    Args:
        series: name, colour and (x, y) pairs of every line; points that are not finite break the line.
        x_show: a value of the lower axis as text; None: they are whole numbers.
        points: whether to mark every value (for few of them), and label the axis at the points.
        from_zero: whether the upright axis starts at zero.
    """
    finite = [(x, y) for _, _, pairs in series for x, y in pairs if math.isfinite(y)]
    if not finite:
        return Drawing()
    x0, x1 = min(x for x, _ in finite), max(x for x, _ in finite)
    y0, y1 = min(y for _, y in finite), max(y for _, y in finite)
    pad = (y1 - y0) * 0.06 or abs(y1) * 0.1 or 1.0
    y0, y1 = 0.0 if from_zero else y0 - pad, y1 + pad
    width, height, left, right, head, foot = 560.0, 230.0, 64.0, 12.0, 26.0, 34.0

    def px(x: float) -> float:
        return left + (width - left - right) * ((x - x0) / (x1 - x0) if x1 > x0 else 0.5)

    def py(y: float) -> float:
        return head + (height - head - foot) * (y1 - y) / (y1 - y0)

    marks, out = ticks(y0, y1, 5), []
    step = marks[1] - marks[0] if len(marks) > 1 else max(map(abs, marks), default=1.0) or 1.0
    for mark in marks:
        out.append(line(left, py(mark), width - right, py(mark), RULE))
        out.append(label(left - 6, py(mark) + 3.6, tick_label(mark, step), 10.5, MUTED, "end"))
    own, show_x = sorted({x for x, _ in finite}), x_show or (lambda mark: f"{mark:,.0f}")
    whole = [m for m in ticks(x0, x1, 6) if x_show or m == round(m)]
    x_marks = own if points and len(own) <= 10 else whole or [x0]
    for mark in x_marks:
        words = show_x(mark)  # in the middle below its mark, but within the picture
        out.append(label(min(px(mark), width - 3.4 * len(words)), height - foot + 15, words, 10.5, MUTED, "middle"))
    out.append(label(width - right, height - 4, x_name, 10.5, MUTED, "end"))
    x = left
    for name, colour, pairs in series:
        for run in _runs(_thinned(pairs, int(width))):
            path = "M" + "L".join(f"{number(px(a))} {number(py(b))}" for a, b in run)
            out.append(element("path", d=path, fill="none", stroke=colour, stroke_width=1.8, stroke_linejoin="round"))
            if points or len(run) == 1:
                out += [element("circle", cx=float(px(a)), cy=float(py(b)), r=3.0, fill=colour) for a, b in run]
        out += [line(x, 10, x + 16, 10, colour, 2.4), label(x + 21, 13.5, name, 11)]
        x += 44 + 6.6 * len(name)
    return picture(width, height, out, title)


def _runs(pairs: Sequence[tuple[float, float]]) -> list[list[tuple[float, float]]]:
    """Split at values that are not finite."""
    out: list[list[tuple[float, float]]] = [[]]
    for x, y in pairs:
        if math.isfinite(y):
            out[-1].append((x, y))
        elif out[-1]:
            out.append([])
    return [run for run in out if run]


def _thinned(pairs: Sequence[tuple[float, float]], buckets: int) -> Sequence[tuple[float, float]]:
    """The points, at most two a pixel column: each bucket's lowest and highest, in order."""
    if len(pairs) <= 2 * buckets:
        return pairs
    size, out = -(-len(pairs) // buckets), []
    for start in range(0, len(pairs), size):
        part = pairs[start : start + size]
        chosen = {
            min(range(len(part)), key=lambda i, part=part: part[i][1]),
            max(range(len(part)), key=lambda i, part=part: part[i][1]),
        }
        out += [part[i] for i in sorted(chosen)]
    return out
