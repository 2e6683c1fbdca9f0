"""Colours, as tokens with a value for a light and one for a dark page, and which of them a stage has.

A drawing names a token, as in `var(--ink)`; a page defines all of them once (`tokens_css`), and `literal` writes the
light values into a drawing that is a file of its own.

Eight hues that stay apart under the common colour-vision deficiencies (after Okabe and Ito, "Color
universal design", 2008), each in three shades: a soft one (forward), which is near the page's ground, a strong one
(backward), which is far from it, and one between them. A dark page therefore exchanges soft and strong. Branches 8 to
15 reuse the hues with a hatch, so shape tells them apart where colour cannot.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from gpp.graph.op_graph import OpGraph
from gpp.stage import Stage

Mode: TypeAlias = Literal["light", "dark"]
Shade: TypeAlias = Literal["soft", "mid", "strong"]


class Colour(NamedTuple):
    """One token's colours, `#rrggbb`."""

    light: str
    dark: str


_HUES = (
    ("#a9d0ec", "#5f9cc8", "#00568a"),  # blue
    ("#fad48c", "#d99a3a", "#8f5300"),  # orange
    ("#a3dfca", "#4fae8e", "#00654b"),  # green
    ("#ecc2da", "#c67fa6", "#8c2f64"),  # purple
    ("#f6b8a0", "#d67a58", "#a03600"),  # vermilion
    ("#c2c4f2", "#8f8dd8", "#43389a"),  # indigo
    ("#ece68f", "#b3a93c", "#655e00"),  # olive
    ("#b5e8f0", "#58b4c4", "#0a6577"),  # cyan
)
_TRUNK = ("#c3cedb", "#8391a5", "#46556b")
_USE = re.compile(r"var\(--([a-z0-9-]+)\)")
_DARK_TEXT, _LIGHT_TEXT = "#111827", "#ffffff"


def _shades(name: str, soft: str, mid: str, strong: str) -> dict[str, Colour]:
    return {f"{name}-soft": Colour(soft, strong), f"{name}-mid": Colour(mid, mid), f"{name}-strong": Colour(strong, soft)}


FILLS: dict[str, Colour] = {
    **_shades("trunk", *_TRUNK),
    **{name: colour for n, hue in enumerate(_HUES) for name, colour in _shades(f"hue{n}", *hue).items()},
    "reduce": Colour("#cfc5b4", "#5d5546"),
    "update": Colour("#968974", "#968974"),
    "other": Colour("#b9b2a8", "#b9b2a8"),
    "predicted": Colour("#93b4d4", "#35618c"),
    "measured": Colour("#1d4e79", "#a8cbe9"),
}
"""Fills that may carry text, in one of the four `on-` tokens below."""

GROUNDS: dict[str, Colour] = {
    "page": Colour("#ffffff", "#12161c"),
    "raised": Colour("#f3f4f6", "#1d232c"),
    "idle": Colour("#f1f2f4", "#1f2630"),
    "note": Colour("#fdf6e8", "#2b2416"),
    "bad": Colour("#fdf0ee", "#331a18"),
}
"""Grounds on which `ink`, `muted` and `link` stand."""

TEXTS: dict[str, Colour] = {
    "ink": Colour("#1f2937", "#e6eaf0"),
    "muted": Colour("#4b5563", "#a9b4c2"),
    "link": Colour("#00568a", "#8cc4ee"),
    "limit": Colour("#b91c1c", "#ff9d94"),
}

STATUS: dict[str, Colour] = {
    "ok": Colour("#d8f3e6", "#0f3d2d"),
    "ok-ink": Colour("#00513b", "#9fe7c9"),
    "infeasible": Colour("#fdecc8", "#4a3410"),
    "infeasible-ink": Colour("#6b3f00", "#f7d48e"),
    "failed": Colour("#fde0dc", "#521a14"),
    "failed-ink": Colour("#8b1a10", "#ffb4a9"),
}
"""How a run ended: a ground and the colour of its word."""

LINES: dict[str, Colour] = {
    "rule": Colour("#d1d5db", "#39424f"),
    "arrow": Colour("#64748b", "#8593a8"),
    "transfer": Colour("#334155", "#cbd5e1"),
    "edge": Colour("#d99a3a", "#d99a3a"),
    "focus": Colour("#0b62c4", "#8cc4ee"),
    "hatch": Colour("#ffffff", "#ffffff"),
}

ON: dict[str, Colour] = {
    "on-soft": Colour(_DARK_TEXT, _LIGHT_TEXT),
    "on-mid": Colour(_DARK_TEXT, _DARK_TEXT),
    "on-strong": Colour(_LIGHT_TEXT, _DARK_TEXT),
}
"""Text on a fill that is light, between, or dark on a light page."""

TOKENS: dict[str, Colour] = {**FILLS, **GROUNDS, **TEXTS, **STATUS, **LINES, **ON}


def token(name: str) -> str:
    """A token as drawings and style sheets name it."""
    if name not in TOKENS:
        raise KeyError(f"no colour is called {name!r}")
    return f"var(--{name})"


def token_name(colour: str) -> str:
    """The name of a token; what is none stays as it is."""
    match = _USE.fullmatch(colour)
    return match[1] if match else colour


@dataclass(frozen=True, slots=True, kw_only=True)
class Tone:
    """One branch's colours; `hatched` marks the second round of the eight hues."""

    name: str
    hatched: bool = False

    def shade(self, which: Shade) -> str:
        return token(f"{self.name}-{which}")

    @property
    def soft(self) -> str:
        return self.shade("soft")

    @property
    def mid(self) -> str:
        return self.shade("mid")

    @property
    def strong(self) -> str:
        return self.shade("strong")


TRUNK = Tone(name="trunk")
IDLE, REDUCE, UPDATE, OTHER, TRANSFER = map(token, ("idle", "reduce", "update", "other", "transfer"))
COPY_OUT, FETCH = token("hue2-mid"), token("hue7-strong")
PREDICTED, MEASURED, LIMIT = map(token, ("predicted", "measured", "limit"))
INK, MUTED, RULE, PAGE, ARROW = map(token, ("ink", "muted", "rule", "page", "arrow"))
ON_SOFT = token("on-soft")


def value(colour: str, mode: Mode = "light") -> str:
    """A token's colour on a page of a mode, `#rrggbb`; a colour that is no token stays as it is."""
    match = _USE.fullmatch(colour)
    return getattr(TOKENS[match[1]], mode) if match else colour


def literal(markup: str) -> str:
    """Markup with the light colours in place of tokens, for a file that has no style sheet."""
    return _USE.sub(lambda match: TOKENS[match[1]].light, markup)


def tokens_css() -> str:
    """Definitions of all tokens: a page follows the reader's system until `data-theme` of its root says otherwise."""

    def block(mode: Mode) -> str:
        return "".join(f"--{name}:{getattr(colour, mode)};" for name, colour in TOKENS.items()) + f"color-scheme:{mode}"

    dark = block("dark")
    return (
        f":root{{{block('light')}}}\n"
        f"@media (prefers-color-scheme:dark){{:root:not([data-theme=light]){{{dark}}}}}\n"
        f":root[data-theme=dark]{{{dark}}}"
    )


def text_on(fill: str) -> str:
    """The token of the text on a fill: the one that can be read on it on both kinds of page."""
    colours = [token(name) for name in ON]
    return max(colours, key=lambda ink: min(contrast(value(ink, mode), value(fill, mode)) for mode in ("light", "dark")))


def tone(branch: int | None) -> Tone:
    """The colours of a branch; None is the trunk, in neutral slate."""
    if branch is None:
        return TRUNK
    return Tone(name=f"hue{branch % len(_HUES)}", hatched=branch // len(_HUES) % 2 == 1)


def branch_shares(stage: Stage, graph: OpGraph, branches: Sequence[int | None]) -> dict[int | None, float]:
    """Share of a stage's FLOPs in each branch (None: trunk), largest first; a stage without FLOPs counts operators."""
    weight = {op: graph.ops[op].forward_flops + graph.ops[op].backward_flops for op in stage.ops}
    total = sum(weight.values())
    out: dict[int | None, float] = {}
    for op in stage.ops:
        branch = branches[op] if op < len(branches) else None
        out[branch] = out.get(branch, 0.0) + (weight[op] / total if total > 0 else 1 / len(stage.ops))
    return dict(sorted(out.items(), key=lambda item: (-item[1], -1 if item[0] is None else item[0])))


def branch_of(stage: Stage, graph: OpGraph, branches: Sequence[int | None]) -> int | None:
    """The branch that holds most of a stage (60 % at least); None for the trunk and for mixtures."""
    branch, share = next(iter(branch_shares(stage, graph, branches).items()))
    return branch if share >= 0.6 else None


def contrast(a: str, b: str) -> float:
    """Contrast ratio of two `#rrggbb` colours, 1 to 21 (WCAG 2.1, 1.4.3 asks for 4.5 in small text)."""
    high, low = sorted((_luminance(a), _luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def _luminance(colour: str) -> float:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b
