"""The terminal's view of a plan's time: bottleneck, idle time by reason, and changes that would help."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from gpp.analysis.explain.explanation import Explanation
from gpp.analysis.explain.idle import REASONS, DeviceTime, Reason
from gpp.analysis.explain.what_if import WhatIf
from gpp.plan.plan import Plan
from gpp.report.draw import text
from gpp.report.run.console import WIDE, new_table
from gpp.report.run.explain_words import (
    LOOKS,
    SAME,
    alternatives_heading,
    bottleneck_words,
    change_words,
    order_words,
    shape_words,
)
from gpp.report.run.record import RunRecord

MOST_ROWS = 8
"""Kinds of device that the terminal shows; the page shows every device."""


def show_explanation(console: Console, run: RunRecord) -> None:
    """Print the bottleneck, the idle time by reason, and the times of other plans and clusters."""
    explanation = run.judged.explanation
    if explanation is None:
        return
    console.print(Text.assemble((f"why {text.seconds(explanation.iteration_s)}: ", "bold"), bottleneck_words(explanation, run)))
    parts = " + ".join(f"{LOOKS[r].name} {text.percent(explanation.idle[r])}" for r in REASONS if explanation.idle[r] >= SAME)
    bubble = f"{text.percent(explanation.bubble_fraction)}{parts and f' = {parts}'}"
    console.print(Text.assemble(("what the bubble is made of: ", "bold"), bubble))
    if explanation.order is not None:
        console.print(Text.assemble(("order of the passes: ", "bold"), order_words(explanation.order)))
    _show_devices(console, explanation, run.plan)
    _show_changes(
        console,
        ("what would relieve the bottleneck (simulated again)", explanation.reliefs),
        (alternatives_heading(explanation), explanation.alternatives),
        ("another cluster (planned again)", explanation.sensitivities),
    )
    if explanation.left_out:
        why = "" if len(explanation.left_out) == 1 and ":" in explanation.left_out[0] else " (explain_s=60 gives it more time)"
        console.print(Text(f"left out: {', '.join(explanation.left_out)}{why}", style="dim"))


def _show_devices(console: Console, explanation: Explanation, plan: Plan | None) -> None:
    """Devices that spend the step alike share a row, which shows their mean; the idlest come first."""
    step = explanation.iteration_s or 1.0
    alike: dict[tuple[int, ...], list[DeviceTime]] = {}
    for device in explanation.devices:
        key = tuple(round(v / step * 200) for v in (device.compute_s, *device.idle_s.values()))
        alike.setdefault(key, []).append(device)
    wide = console.width >= WIDE
    reasons: list[Reason] = [r for r in REASONS if explanation.idle[r] >= SAME]
    columns = [("stages", "left"), *([("devices", "left")] if wide else []), ("compute", "right")]
    table = new_table("", *columns, *((LOOKS[r].name if wide else LOOKS[r].short, "right") for r in reasons))
    rows = sorted(alike.values(), key=lambda devices: (devices[0].compute_s, devices[0].device))
    for devices in rows[:MOST_ROWS]:
        cells = [text.ranges((s for d in devices for s in (plan.stages_of_device[d.device] if plan else (d.stage,))), "s")]
        cells += [text.ranges((d.device for d in devices), "d")] if wide else []
        cells.append(_cell(sum(d.compute_s for d in devices) / len(devices) / step))
        cells += [_cell(sum(d.idle_s[r] for d in devices) / len(devices) / step) for r in reasons]
        table.add_row(*cells)
    console.print(table)
    if len(rows) > MOST_ROWS:
        rest = sum(len(devices) for devices in rows[MOST_ROWS:])
        console.print(Text(f"{rest} further devices, which wait less, are in report.html", style="dim"))


def _cell(share: float) -> str:
    return text.percent(share) if share >= SAME else "·"


def _show_changes(console: Console, *groups: tuple[str, Sequence[WhatIf]]) -> None:
    """All changes in one table, a heading over each group."""
    wide = console.width >= WIDE
    columns = [("what if", "left"), ("step", "right"), ("", "right"), *([("its plan", "left")] if wide else [])]
    table = new_table("", *columns)
    for heading, changes in groups:
        if changes:
            table.add_row(Text(heading, style="bold"), *[""] * (len(columns) - 1))
        for change in changes:
            better = change.speedup is not None and change.speedup > 1 + SAME
            style = "green" if better else "" if change.iteration_s is not None else "yellow"
            plan = shape_words(change.shape) if change.shape else text.shorten_end(change.reason, console.width - 80)
            cells = [f"  {change.change}", text.seconds(change.iteration_s), Text(change_words(change), style=style)]
            table.add_row(*cells, *([plan] if wide else []))
    if table.row_count:
        console.print(table)
