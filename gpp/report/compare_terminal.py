"""What the terminal shows of several strategies on one problem."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from gpp.report.comparison import gap_words, lines, reason_lines
from gpp.report.record import RunRecord
from gpp.report.terminal import WIDE, new_table

COLUMNS = ("strategy", "predicted", "samples/s", "× best", "bubble", "memory", "stages", "depth", "devices", "b", "search")
NARROW = ("strategy", "predicted", "× best", "bubble", "memory", "stages", "b", "search", "gap")
"""`gap`: from optimal, at most."""


def compare_table(run: RunRecord, width: int) -> Table:
    """One line a strategy; below `WIDE` columns the most telling facts only."""
    found = lines(run.compared, run.bound)
    wide = width >= WIDE
    names = list(COLUMNS) if wide else list(NARROW)
    if wide:
        names += ["own objective"] * any(line.attempt.objective for line in found) + ["from optimal", "status"]
    table = new_table("", *((name, "left" if name in ("strategy", "status", "own objective") else "right") for name in names))
    table.columns[0].no_wrap = True
    if wide:
        table.columns[-1].no_wrap, table.columns[-1].overflow = True, "ellipsis"
    for line in found:
        cells = line.cells()
        cells["gap"] = cells["from optimal"]
        if line.attempt.status != "ok" and not wide:
            cells["predicted"] = "no plan"
        if wide and line.attempt.reason:
            cells["status"] += f": {line.attempt.reason.splitlines()[0]}"
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
        console.print(Text.assemble("best: ", (best.attempt.strategy, "bold green"), f", {gap_words(best.gap, run.bound)}"))
