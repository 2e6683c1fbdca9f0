"""Small pictures for notebooks, drawn without the report: stages as boxes with arrows, and devices' work as bars.

Text and lines take the colour of the notebook's own text, so that both read on a light and on a dark page.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

BOX, GAP, ROW = (190, 58), (46, 16), 26
"""Width and height of a stage's box, the gaps between two, and the height of a device's row, in pixels."""
WIDTH, LEFT = 880, 64
"""Width of a picture of devices, and of the names at its left."""


def hue(number: int) -> int:
    """A colour for a stage, as far from its neighbours' as can be: the golden angle, in degrees."""
    return round(210 + 137.508 * number) % 360


def picture(width: float, height: float, body: Iterable[str], title: str) -> str:
    """An SVG whose width shrinks with the page."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" role="img" '
    style = 'style="max-width:100%;height:auto;color:inherit" font-family="sans-serif" font-size="12" fill="currentColor">'
    return f"{head}{style}<title>{escape(title)}</title>{''.join(body)}</svg>"


def words_at(x: float, y: float, words: str, anchor: str = "start") -> str:
    """A line of text."""
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(words)}</text>'


def stages(boxes: Sequence[tuple[int, Sequence[str]]], edges: Iterable[tuple[int, int]], title: str) -> str:
    """Stages in columns, and arrows between them.

    Args:
        boxes: of each stage its column, and up to three lines of words.
        edges: (stage, stage that follows).
    """
    columns: dict[int, list[int]] = {}
    for stage, (column, _) in enumerate(boxes):
        columns.setdefault(column, []).append(stage)
    tallest = max(map(len, columns.values()))
    place = dict[int, tuple[float, float]]()
    for column, members in columns.items():
        for row, stage in enumerate(members):
            y = (row + (tallest - len(members)) / 2) * (BOX[1] + GAP[1])
            place[stage] = (4 + column * (BOX[0] + GAP[0]), 4 + y)
    body = []
    for s, t in edges:
        x, y = place[s][0] + BOX[0], place[s][1] + BOX[1] / 2
        to_x, to_y = place[t][0], place[t][1] + BOX[1] / 2
        half = (x + to_x) / 2
        body.append(
            f'<path d="M{x:g} {y:g}C{half:g} {y:g} {half:g} {to_y:g} {to_x:g} {to_y:g}" fill="none" stroke="currentColor"/>'
            f'<path d="M{to_x:g} {to_y:g}l-7 -4v8z"/>'
        )
    for stage, (_, lines) in enumerate(boxes):
        x, y = place[stage]
        body.append(
            f'<rect x="{x:g}" y="{y:g}" width="{BOX[0]}" height="{BOX[1]}" rx="6" fill="hsl({hue(stage)} 60% 50% / 0.25)" '
            f'stroke="hsl({hue(stage)} 60% 50%)"/>'
        )
        body += [words_at(x + 9, y + 18 + 16 * i, line) for i, line in enumerate(lines[:3])]
    width = 8 + len(columns) * (BOX[0] + GAP[0]) - GAP[0]
    return picture(width, 8 + tallest * (BOX[1] + GAP[1]) - GAP[1], body, title)


def bars(rows: Sequence[tuple[str, Sequence[tuple[float, float, int, float, str]]]], end: float, title: str) -> str:
    """Rows of bars on one scale, which begins at 0.

    Args:
        rows: name, and its bars: (start, end, number of the colour, opacity, words shown on a touch).
        end: of the scale, in the unit of the bars; a line under the rows has `title`.
    """
    scale, body = (WIDTH - LEFT - 4) / (end or 1.0), list[str]()
    for row, (name, content) in enumerate(rows):
        y = row * ROW + 3
        body.append(words_at(0, y + 15, name))
        body.append(f'<path d="M{LEFT} {y + ROW - 4}H{WIDTH}" stroke="currentColor" stroke-opacity="0.2"/>')
        for start, stop, number, opacity, words in content:
            place = f'x="{LEFT + start * scale:.2f}" y="{y}" width="{max(0.5, (stop - start) * scale):.2f}" height="{ROW - 5}"'
            body.append(f'<rect {place} fill="hsl({hue(number)} 60% 50% / {opacity:g})"><title>{escape(words)}</title></rect>')
    body.append(words_at(LEFT, len(rows) * ROW + 18, title))
    return picture(WIDTH, len(rows) * ROW + 26, body, title)
