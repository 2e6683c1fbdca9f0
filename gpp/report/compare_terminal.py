"""What the terminal shows of several strategies on one problem."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from gpp.report.comparison import certificate, columns, lines, reason_lines
from gpp.report.record import RunRecord
from gpp.report.terminal import new_table

LEFT = ("strategy", "status", "own objective")
FIRST_TO_GO = ("samples/s", "devices", "depth", "status", "own objective", "memory", "stages")
"""Columns that give way, in this order, where a terminal has no room for all."""


def compare_table(run: RunRecord, width: int) -> Table:
    """One line a strategy, with as many facts as fit."""
    found = lines(run.compared, run.bound)
    rows = [line.cells() for line in found]
    names = columns(found)

    def needed() -> int:
        return sum(max(len(name), *(len(row[name]) for row in rows)) + 2 for name in names)

    for name in FIRST_TO_GO:
        if needed() > width and name in names:
            names.remove(name)
    table = new_table("", *((name, "left" if name in LEFT else "right") for name in names))
    table.columns[0].no_wrap = True
    for line, cells in zip(found, rows, strict=True):
        if "status" not in names and line.attempt.status != "ok":
            cells["predicted"] = "no plan"
        style = "bold green" if line.is_best else "" if line.attempt.status == "ok" else "yellow"
        table.add_row(*[escape(cells[name]) for name in names], style=style)
    return table


def show_comparison(console: Console, run: RunRecord) -> None:
    """Print heading, table, why some have no plan, and the certificate of the best."""
    result = run.result
    console.print(
        Text.assemble(
            (str(result.get("model")), "bold"),
            " · ",
            (f"{len(run.compared)} strategies", "bold cyan"),
            f" · {result.get('cluster')} · {result.get('engine')}",
        )
    )
    if run.graph is not None and run.cluster is not None:
        batch = f", mini-batch {run.plan.minibatch_size}" if run.plan else ""
        console.print(f"{run.graph.num_ops} operators on {run.cluster.num_devices} devices{batch}", style="dim")
    console.print(compare_table(run, console.width))
    for line in reason_lines(run.compared):
        console.print(Text(line, style="yellow"))
    best = next((line for line in lines(run.compared, run.bound) if line.is_best), None)
    if best is not None:
        words = certificate(best.attempt.plan, best.metrics, best.bound)
        console.print(Text.assemble("best: ", (best.attempt.strategy, "bold green"), f", {words}" if words else ""))
