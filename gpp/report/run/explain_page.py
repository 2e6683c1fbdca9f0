"""The page's section on a plan's time: bottleneck, idle time by reason, and changes that would help."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gpp.analysis.explain.explanation import Explanation
from gpp.analysis.explain.idle import REASONS
from gpp.report.draw import text
from gpp.report.draw.charts import PAGE_WIDTH
from gpp.report.draw.page import Cell, Column, PageTable
from gpp.report.draw.palette import INK, MUTED, OTHER, PREDICTED, RULE, TRUNK
from gpp.report.draw.svg import Drawing, element, label, line, picture, rect, swatch, ticks
from gpp.report.run.explain_words import (
    LOOKS,
    SAME,
    alternatives_heading,
    bottleneck_words,
    change_words,
    order_words,
    shape_words,
)
from gpp.report.run.key_figures import worth_words
from gpp.report.run.record import RunRecord

COMPUTE_FILL = TRUNK.mid
LEFT, GAP, RIGHT = 92.0, 40.0, 62.0
MOST_STAGES = 6
"""Characters of a row's stages that fit beside it."""


def explanation_view(explanation: Explanation, run: RunRecord) -> dict[str, Any]:
    """The values of `explanation.html`: the bottleneck, the reasons of idle time, and the effects of changes."""
    proof = worth_words(run, explanation.bound)
    shares = [("compute", COMPUTE_FILL, 1 - explanation.bubble_fraction)]
    shares += [(LOOKS[r].name, LOOKS[r].fill, explanation.idle[r]) for r in REASONS if explanation.idle[r] >= SAME]
    return {
        "bottleneck": text.sentence(bottleneck_words(explanation, run)),
        "order": f"{text.sentence(order_words(explanation.order))}." if explanation.order else "",
        "certificate": f"{text.sentence(proof)}." if proof else "",
        "swatches": [swatch(f"{name} {text.percent(share)}", rect(0, 0, 26, 12, fill)) for name, fill, share in shares],
        "bubble": f"of all device time; the bubble is {text.percent(explanation.bubble_fraction)}",
        "devices": draw_devices(explanation, run.plan.stages_of_device if run.plan else {}),
        "changes": _changes(explanation),
        "left_out": f"Left out: {', '.join(explanation.left_out)}." if explanation.left_out else "",
    }


def draw_devices(explanation: Explanation, stages_of: Mapping[int, Sequence[int]]) -> Drawing:
    """A bar of the whole step for every device, and beside it the idle part alone, enlarged.

    Args:
        stages_of: device -> its stages, where it may have several.
    """
    devices, step = explanation.devices, explanation.iteration_s or 1.0
    height = 18.0 if len(devices) <= 16 else 13.0 if len(devices) <= 40 else 8.0
    half = (PAGE_WIDTH - LEFT - GAP - RIGHT) / 2
    middle = LEFT + half + GAP
    most = max((step - device.compute_s for device in devices), default=0.0) or step
    out = [label(LEFT, 11, "the whole step", 10.5, MUTED), label(middle, 11, "its idle part, enlarged", 10.5, MUTED)]
    out.append(label(PAGE_WIDTH, 11, "idle", 10.5, MUTED, "end"))
    y, size = 18.0, min(11.0, height + 0.5)
    for device in devices:
        own = text.shorten_end("+".join(map(str, stages_of.get(device.device, (device.stage,)))), MOST_STAGES)
        base, name = y + height / 2 + size * 0.36, f"s{own}  d{device.device}"
        row = [label(LEFT - 8, base, name, size, INK, "end")]
        idle = [(LOOKS[reason].meaning, LOOKS[reason].fill, device.idle_s[reason]) for reason in REASONS]
        row += _bar(name, [("computing", COMPUTE_FILL, device.compute_s), *idle], LEFT, y, height, half / step, step)
        row += _bar(name, idle, middle, y, height, half / most, step)
        row.append(label(PAGE_WIDTH, base, text.percent(1 - device.compute_s / step), size, INK, "end"))
        out.append(element("g", "".join(row), data_stage=device.stage))
        y += height + 3
    out += _axis(1.0, LEFT, y, half) + _axis(most / step, middle, y, half)
    return picture(PAGE_WIDTH, y + 24, out, "What each device does and waits for")


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


def _changes(explanation: Explanation) -> PageTable:
    """All changes, with a bar for each one's step."""
    groups = (
        ("The plan changed and simulated again", explanation.reliefs),
        (alternatives_heading(explanation).capitalize(), explanation.alternatives),
        ("Planned again for another cluster", explanation.sensitivities),
    )
    columns = [Column("change"), Column("step", "n"), Column(""), Column("against this plan", "n"), Column("its plan")]
    own = explanation.iteration_s
    longest = max([own, *(c.iteration_s or 0.0 for _, changes in groups for c in changes)])
    rows: list[list[str | Cell]] = [["this plan", text.seconds(own), _step_bar(own, own, longest), "", ""]]
    for heading, changes in groups:
        if changes:
            rows.append([Cell(text=heading, look="heading"), "", "", "", ""])
        rows += [
            [
                Cell(text=change.change, look="line"),
                text.seconds(change.iteration_s),
                _step_bar(change.iteration_s, own, longest),
                change_words(change),
                shape_words(change.shape) if change.shape else change.reason,
            ]
            for change in changes
        ]
    return PageTable(columns=columns, rows=rows, sortable=False)


def _step_bar(seconds: float | None, own: float, longest: float) -> Drawing:
    """A step as a bar, with a mark where this plan's ends."""
    if seconds is None or longest <= 0:
        return Drawing()
    width, height = 260.0, 13.0
    end, mark = seconds / longest * (width - 2), own / longest * (width - 2)
    body = [rect(0, 1, end, height - 2, PREDICTED if seconds <= own * (1 + SAME) else OTHER)]
    body.append(line(mark, 0, mark, height, INK, 1.4))
    return picture(width, height, body, text.seconds(seconds))
