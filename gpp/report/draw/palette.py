"""Colours of branches and kinds.

Eight hues that stay apart under the common colour-vision deficiencies (after Okabe and Ito, "Color
universal design", 2008), each as a light tone (forward, dark text) and a dark one (backward, white
text). Branches 8 to 15 reuse the hues with a hatch, so shape tells them apart where colour cannot.
"""

from __future__ import annotations

from dataclasses import dataclass

from gpp.graph.op_graph import OpGraph
from gpp.plan.stage import Stage


@dataclass(frozen=True, slots=True, kw_only=True)
class Tone:
    """One branch's colours; `hatched` marks the second round of the eight hues."""

    light: str
    mid: str
    dark: str
    hatched: bool = False


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
TRUNK = Tone(light="#c3cedb", mid="#8391a5", dark="#46556b")
IDLE = "#f1f2f4"
REDUCE, UPDATE, OTHER, TRANSFER = "#cfc5b4", "#8d806b", "#b9b2a8", "#334155"
COPY_OUT, FETCH = "#4fae8e", "#0a6577"
PREDICTED, MEASURED, LIMIT = "#93b4d4", "#1d4e79", "#b91c1c"
INK, MUTED, RULE = "#1f2937", "#4b5563", "#d1d5db"


def tone(branch: int | None) -> Tone:
    """The colours of a branch; None is the trunk, in neutral slate."""
    if branch is None:
        return TRUNK
    light, mid, dark = _HUES[branch % len(_HUES)]
    return Tone(light=light, mid=mid, dark=dark, hatched=branch // len(_HUES) % 2 == 1)


def branch_shares(stage: Stage, graph: OpGraph, branches: tuple[int | None, ...]) -> dict[int | None, float]:
    """Share of a stage's FLOPs in each branch (None: trunk), largest first; a stage without FLOPs counts operators."""
    weight = {op: graph.ops[op].forward_flops + graph.ops[op].backward_flops for op in stage.ops}
    total = sum(weight.values())
    out: dict[int | None, float] = {}
    for op in stage.ops:
        branch = branches[op] if op < len(branches) else None
        out[branch] = out.get(branch, 0.0) + (weight[op] / total if total > 0 else 1 / len(stage.ops))
    return dict(sorted(out.items(), key=lambda item: (-item[1], -1 if item[0] is None else item[0])))


def branch_of(stage: Stage, graph: OpGraph, branches: tuple[int | None, ...]) -> int | None:
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
