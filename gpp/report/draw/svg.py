"""SVG strings by hand: numbers, elements, ticks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape as escape_markup
from typing import Any

from gpp.errors import printable
from gpp.report.draw.palette import MUTED, PAGE, literal

MONO = "ui-monospace,'DejaVu Sans Mono',Menlo,Consolas,monospace"
SANS = "system-ui,-apple-system,'Segoe UI','DejaVu Sans',Roboto,sans-serif"
MONO_ADVANCE = 0.61  # em, the width in every common monospace face


class Drawing(str):
    """Markup that is ready for a page: templates take it as it is."""

    __slots__ = ()

    def __html__(self) -> str:
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class Swatch:
    """An entry of a legend: a patch that is 12 pixels tall, and its meaning."""

    words: str
    patch: Drawing


def escape(words: str) -> str:
    """Words as markup shows them; control characters, which no markup may hold, are written as escapes."""
    return escape_markup(printable(words), quote=True)


def number(value: float) -> str:
    """A coordinate with one decimal at most."""
    return "0" if abs(value) < 0.05 else f"{value:.1f}".removesuffix(".0")


def element(tag: str, content: str = "", **attributes: Any) -> str:
    """One element: `_` in attribute names becomes `-`, floats are shortened, values escaped; content stays as it is."""
    pairs = []
    for key, value in attributes.items():
        if value is not None:
            text = number(value) if isinstance(value, float) else escape(str(value))
            pairs.append(f' {key.rstrip("_").replace("_", "-")}="{text}"')
    return f"<{tag}{''.join(pairs)}>{content}</{tag}>" if content else f"<{tag}{''.join(pairs)}/>"


def tooltip(words: str) -> str:
    """The words that a shape shows on hovering, as the first of its content; nothing without words."""
    return element("title", escape(words)) if words else ""


def rect(x: float, y: float, width: float, height: float, fill: str, title: str = "", **attributes: Any) -> str:
    """A filled rectangle; `title` is shown on hovering."""
    return element(
        "rect",
        tooltip(title),
        x=float(x),
        y=float(y),
        width=float(width),
        height=float(height),
        fill=fill,
        **attributes,
    )


def label(
    x: float,
    y: float,
    content: str,
    size: float = 11,
    fill: str = MUTED,
    anchor: str | None = None,
    title: str = "",
    **attributes: Any,
) -> str:
    """One line of text, `y` its baseline; `anchor` is start, middle or end."""
    return element(
        "text",
        escape(content) + tooltip(title),
        x=float(x),
        y=float(y),
        font_size=float(size),
        fill=fill,
        text_anchor=anchor,
        **attributes,
    )


def line(x1: float, y1: float, x2: float, y2: float, stroke: str, width: float = 1, **attributes: Any) -> str:
    """A straight line."""
    return element(
        "line", x1=float(x1), y1=float(y1), x2=float(x2), y2=float(y2), stroke=stroke, stroke_width=float(width), **attributes
    )


LEAST, MOST = 0.86, 1.25
"""How far a page may shrink a drawing, so that its words can be read, and enlarge it."""


def picture(width: float, height: float, body: Sequence[str], title: str) -> Drawing:
    """A drawing that fills its container's width, between `LEAST` and `MOST` times its own."""
    svg = element(
        "svg",
        "".join(body),
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {number(width)} {number(height)}",
        width=float(width),
        height=float(height),
        style=f"width:100%;height:auto;max-width:{MOST * width:.0f}px;min-width:{LEAST * width:.0f}px",
        role="img",
        aria_label=title,
    )
    return Drawing(svg)


def standalone(svg: str) -> str:
    """A drawing as a file of its own: white ground, the colours of a light page, its typeface."""
    head, _, rest = svg.partition(">")
    ground = element("rect", width="100%", height="100%", fill=PAGE)
    return literal(f'{head} font-family="{SANS}">{ground}{rest}\n')


def swatch(words: str, *shapes: str, width: float = 26.0) -> Swatch:
    """An entry of a legend, from shapes that lie in `width` by 12 pixels."""
    view = f"0 0 {number(width)} 12"
    patch = element("svg", "".join(shapes), viewBox=view, width=float(width), height=12, aria_hidden="true")
    return Swatch(words=words, patch=Drawing(patch))


def ticks(low: float, high: float, count: int = 8) -> list[float]:
    """Round numbers (1, 2 or 5 times a power of ten apart) from `low` to `high`, about `count` of them."""
    if not high > low:
        return [low]
    raw = (high - low) / max(1, count)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def tick_label(value: float, step: float) -> str:
    """A tick's number with the decimals that its step needs."""
    decimals = max(0, -math.floor(math.log10(step) + 1e-9)) if step > 0 else 0
    return f"{value:,.{min(decimals, 9)}f}"
