"""The terminal's view of a sweep: a row for every job."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from gpp.report.draw import text
from gpp.report.run.console import PIPE_WIDTH, WIDE, new_table
from gpp.report.sweep.figure import FigureData
from gpp.report.sweep.figure_chart import figure_table
from gpp.report.sweep.jobs import numbers, source_of


def results_table(results: Sequence[dict[str, Any]], width: int = PIPE_WIDTH) -> Table:
    """A table of runs from result.json dicts; speed-ups are over `sequential` on the same model, cluster, engine."""
    wide = width >= WIDE
    columns = [("strategy", "left"), ("model", "left"), ("predicted", "right"), (source_of(results), "right"), ("vs seq.", "right")]
    columns += [("bubble", "right"), ("peak memory", "right"), ("depth", "right")] if wide else []
    table = new_table("", *columns, ("status", "left"))
    for result in results:
        predicted, measured = result.get("predicted") or {}, result.get("measured") or {}
        best, status = measured or predicted, str(result.get("status"))
        row = [
            str(result.get("strategy") or "–"),
            str(result.get("model") or "–"),
            text.seconds(predicted.get("iteration_s")),
            text.seconds(measured.get("iteration_s")),
            text.ratio(_speedup(result, results)),
        ]
        if wide:
            peaks = numbers((best.get("peak_memory_bytes") or {}).values())
            depth = (result.get("plan") or {}).get("depth")
            row += [
                text.percent(best.get("bubble_fraction")),
                text.num_bytes(max(peaks, default=None)),
                "–" if depth is None else str(depth),
            ]
        why = str(result.get("reason") or "") if status != "ok" else ""
        end = f"{status}: {text.shorten_end(why.splitlines()[0], 90 if wide else 40)}" if why else status
        style = {"ok": "green", "infeasible": "yellow"}.get(status, "red")
        table.add_row(*[escape(cell) for cell in row], Text(end, style=style))
    return table


def show_figures(console: Console, figures: Sequence[FigureData]) -> None:
    """Print the tables of figures that ask for it, with their notes."""
    for data in figures:
        if data.figure.terminal:
            table = figure_table(data)
            shown = new_table(data.figure.title, *((column.name, "right" if column.kind else "left") for column in table.columns))
            for row in table.rows:
                lines = [
                    cell if isinstance(cell, str) else f"{cell.text} ({cell.small})" if cell.small else cell.text for cell in row
                ]
                shown.add_row(*map(escape, lines))
            console.print(shown)
            for note in data.figure.notes:
                console.print(Text(note, style="dim"))


def _speedup(result: dict[str, Any], results: Sequence[dict[str, Any]]) -> float | None:
    """The speed-up over `sequential`: measured where both are measured, else predicted."""

    def alike(other: dict[str, Any], keys: tuple[str, ...]) -> bool:
        return all(other.get(key) == result.get(key) for key in keys)

    for keys in (("model", "cluster", "engine", "seed"), ("model", "cluster", "engine"), ("model", "cluster")):
        for other in results:
            if other.get("strategy") == "sequential" and alike(other, keys):
                for kind in ("measured", "predicted"):
                    mine, theirs = (r.get(kind) or {} for r in (result, other))
                    value = text.quotient(theirs.get("iteration_s"), mine.get("iteration_s"))
                    if value is not None:
                        return value
    return None
