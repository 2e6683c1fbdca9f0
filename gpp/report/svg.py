"""SVG strings by hand: numbers, elements, ticks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Any

from gpp.report.palette import MUTED

MONO = "ui-monospace,'DejaVu Sans Mono',Menlo,Consolas,monospace"
SANS = "system-ui,-apple-system,'Segoe UI','DejaVu Sans',Roboto,sans-serif"
MONO_ADVANCE = 0.61  # em; of every common monospace face


def number(value: float) -> str:
    """A coordinate with one decimal at most."""
    return "0" if abs(value) < 0.05 else f"{value:.1f}".removesuffix(".0")


def element(tag: str, content: str = "", **attributes: Any) -> str:
    """One element; `_` in attribute names becomes `-`, floats are shortened, values escaped, content is taken as it is."""
    pairs = []
    for key, value in attributes.items():
        if value is not None:
            text = number(value) if isinstance(value, float) else escape(str(value), quote=True)
            pairs.append(f' {key.rstrip("_").replace("_", "-")}="{text}"')
    return f"<{tag}{''.join(pairs)}>{content}</{tag}>" if content else f"<{tag}{''.join(pairs)}/>"


def rect(x: float, y: float, width: float, height: float, fill: str, title: str = "", **attributes: Any) -> str:
    """A filled rectangle; `title` is shown on hovering."""
    return element(
        "rect",
        f"<title>{escape(title)}</title>" if title else "",
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
    inner = escape(content) + (f"<title>{escape(title)}</title>" if title else "")
    return element("text", inner, x=float(x), y=float(y), font_size=float(size), fill=fill, text_anchor=anchor, **attributes)


def line(x1: float, y1: float, x2: float, y2: float, stroke: str, width: float = 1, **attributes: Any) -> str:
    """A straight line."""
    return element(
        "line", x1=float(x1), y1=float(y1), x2=float(x2), y2=float(y2), stroke=stroke, stroke_width=float(width), **attributes
    )


def picture(width: float, height: float, body: Sequence[str], title: str, min_width: float | None = None) -> str:
    """A drawing that fills its container's width, but never shrinks below `min_width` pixels."""
    style = f"width:100%;height:auto;max-width:{width:.0f}px;min-width:{width if min_width is None else min_width:.0f}px"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {number(width)} {number(height)}" width="{number(width)}" '
        f'height="{number(height)}" style="{style}" role="img" aria-label="{escape(title)}">' + "".join(body) + "</svg>"
    )


def standalone(svg: str) -> str:
    """A drawing as a file of its own: white ground, the page's typeface."""
    head, _, rest = svg.partition(">")
    ground = element("rect", width="100%", height="100%", fill="#ffffff")
    return f'{head} font-family="{SANS}">{ground}{rest}\n'


def swatch(words: str, patch: str) -> str:
    """An entry of a legend, as HTML: a patch of 26 by 12 pixels and what it means."""
    return f'<span><svg viewBox="0 0 26 12" width="26" height="12" aria-hidden="true">{patch}</svg>{escape(words)}</span>'


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
