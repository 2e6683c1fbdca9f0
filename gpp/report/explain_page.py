"""Why a plan takes the time that it takes, as a section of the page."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from gpp.analysis.explain.explanation import Explanation
from gpp.analysis.explain.idle import REASONS, Reason
from gpp.report import text
from gpp.report.comparison import certificate
from gpp.report.explain_words import (
    REASON_NAMES,
    REASON_WORDS,
    SAME,
    alternatives_heading,
    bottleneck_words,
    change_words,
    shape_words,
)
from gpp.report.page import Column, Html, scroll, table
from gpp.report.palette import INK, MUTED, OTHER, PREDICTED, REDUCE, RULE, TRUNK, UPDATE
from gpp.report.record import RunRecord
from gpp.report.svg import label, line, picture, rect, swatch, ticks

COMPUTE_FILL = TRUNK.mid
FILLS: dict[Reason, str] = {
    "fill": "#a9d0ec",
    "data": "#d99a3a",
    "gradient": "#a03600",
    "drain": "#c2c4f2",
    "peers": "#c67fa6",
    "all_reduce": REDUCE,
    "update": UPDATE,
}
LEFT, GAP, RIGHT = 76.0, 40.0, 62.0


def explanation_section(explanation: Explanation, run: RunRecord) -> str:
    """What bounds the plan, what its devices wait for, and what would change it."""
    words = certificate(run.plan, run.predicted.metrics if run.predicted else None, explanation.bound)
    bottleneck = bottleneck_words(explanation, run)
    parts = [f"<p>{escape(bottleneck[:1].upper() + bottleneck[1:])}</p>"]
    parts.append(f"<p>{escape(words[:1].upper() + words[1:])}.</p>" if words else "")
    parts.append("<h3>What each device does and waits for</h3>" + _key(explanation) + scroll(draw_devices(explanation)))
    parts.append("<h3>What if</h3>" + _changes(explanation))
    if explanation.left_out:
        parts.append(f'<p class="sub">Left out: {escape(", ".join(explanation.left_out))}.</p>')
    return "".join(parts)


def _key(explanation: Explanation) -> str:
    shares = [("compute", COMPUTE_FILL, 1 - explanation.bubble_fraction)]
    shares += [(REASON_NAMES[r], FILLS[r], explanation.idle[r]) for r in REASONS if explanation.idle[r] >= SAME]
    marks = [swatch(f"{name} {text.percent(share)}", rect(0, 0, 26, 12, fill)) for name, fill, share in shares]
    whole = f"<span>of all device time; the bubble is {text.percent(explanation.bubble_fraction)}</span>"
    return f'<p class="key">{"".join(marks)}{whole}</p>'


def draw_devices(explanation: Explanation, width: float = 1320.0) -> str:
    """For every device the whole step as a bar, and beside it its idle part alone, enlarged."""
    devices, step = explanation.devices, explanation.iteration_s or 1.0
    height = 18.0 if len(devices) <= 16 else 13.0 if len(devices) <= 40 else 8.0
    half = (width - LEFT - GAP - RIGHT) / 2
    middle = LEFT + half + GAP
    most = max((step - device.compute_s for device in devices), default=0.0) or step
    out = [label(LEFT, 11, "the whole step", 10.5, MUTED), label(middle, 11, "its idle part, enlarged", 10.5, MUTED)]
    out.append(label(width, 11, "idle", 10.5, MUTED, "end"))
    y, size = 18.0, min(11.0, height + 0.5)
    for device in devices:
        base, name = y + height / 2 + size * 0.36, f"s{device.stage}  d{device.device}"
        out.append(label(LEFT - 8, base, name, size, INK, "end"))
        idle = [(REASON_WORDS[reason], FILLS[reason], device.idle_s[reason]) for reason in REASONS]
        out += _bar(name, [("computing", COMPUTE_FILL, device.compute_s), *idle], LEFT, y, height, half / step, step)
        out += _bar(name, idle, middle, y, height, half / most, step)
        out.append(label(width, base, text.percent(1 - device.compute_s / step), size, INK, "end"))
        y += height + 3
    out += _axis(1.0, LEFT, y, half) + _axis(most / step, middle, y, half)
    return picture(width, y + 24, out, "What each device does and waits for", min_width=min(width, 1000.0))


def _axis(share: float, x: float, y: float, width: float) -> list[str]:
    """An axis in per cent of the step, from nothing to `share`."""
    marks = ticks(0.0, 100 * share, 5)
    out = [line(x, y + 2, x + width, y + 2, RULE)]
    for mark in marks:
        at = x + mark / (100 * share) * width
        out += [line(at, y + 2, at, y + 6, MUTED), label(at, y + 17, f"{mark:g} %", 10.5, MUTED, "middle")]
    return out


def _bar(
    name: str, spans: Sequence[tuple[str, str, float]], x: float, y: float, height: float, scale: float, step: float
) -> list[str]:
    out = []
    for words, fill, seconds in spans:
        if seconds * scale > 0.05:
            tip = f"{name}, {words}: {text.seconds(seconds)}, {text.percent(seconds / step)}"
            out.append(rect(x, y, seconds * scale, height, fill, tip))
            x += seconds * scale
    return out


def _changes(explanation: Explanation) -> str:
    """One table of all changes, with a bar for each one's step."""
    groups = (
        ("The plan changed and simulated again", explanation.reliefs),
        (alternatives_heading(explanation).capitalize(), explanation.alternatives),
        ("Planned again for another cluster", explanation.sensitivities),
    )
    columns = [
        Column(name="change"),
        Column(name="step", kind="n"),
        Column(name=""),
        Column(name="against this plan", kind="n"),
        Column(name="its plan"),
    ]
    own = explanation.iteration_s
    longest = max([own, *(c.iteration_s or 0.0 for _, changes in groups for c in changes)])
    rows = [["this plan", text.seconds(own), _step_bar(own, own, longest), "", ""]]
    for heading, changes in groups:
        if changes:
            rows.append([_one_line(heading, bold=True), "", "", "", ""])
        rows += [
            [
                _one_line(change.change),
                text.seconds(change.iteration_s),
                _step_bar(change.iteration_s, own, longest),
                change_words(change),
                shape_words(change.shape) if change.shape else change.reason,
            ]
            for change in changes
        ]
    return table(columns, rows)


def _one_line(words: str, bold: bool = False) -> Html:
    return Html(f'<span style="white-space:nowrap{";font-weight:600" if bold else ""}">{escape(words)}</span>')


def _step_bar(seconds: float | None, own: float, longest: float) -> str:
    """A step as a bar, with a mark where this plan's ends."""
    if seconds is None or longest <= 0:
        return ""
    width, height = 260.0, 13.0
    body = [rect(0, 1, seconds / longest * (width - 2), height - 2, PREDICTED if seconds <= own * (1 + SAME) else OTHER)]
    body.append(line(own / longest * (width - 2), 0, own / longest * (width - 2), height, INK, 1.4))
    return Html(picture(width, height, body, text.seconds(seconds)))
