"""The terminal's view of several strategies on one problem."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from gpp.errors import counted
from gpp.report.draw import text
from gpp.report.run.console import new_table, show_heading, with_room
from gpp.report.run.key_figures import line_worth_words
from gpp.report.run.record import RunRecord
from gpp.report.run.strategies import WORDS, best_lines, columns, legend, reason_lines, strategy_lines

FIRST_TO_GO = ("samples/s", "devices", "depth", "status", "own objective", "memory", "stages")
"""Columns that give way in a narrow terminal, in this order."""


def compare_table(run: RunRecord, width: int) -> tuple[Table, str]:
    """A row for every strategy, with the columns for which there is room; and what these mean."""
    found = strategy_lines(run.attempts, run.judged.bound)
    shown, rows = columns(found), [line.cells() for line in found]
    rows = [{name: row[name] for name in shown} for row in rows]
    names = with_room(rows, FIRST_TO_GO, width)
    table = new_table("", *((name, "left" if name in WORDS else "right") for name in names))
    table.columns[0].no_wrap = True
    for line, cells in zip(found, rows, strict=True):
        if "status" not in names and line.attempt.status != "ok":
            cells["predicted"] = "no plan"
        style = "bold green" if line.is_best else "" if line.attempt.status == "ok" else "yellow"
        table.add_row(*[escape(cells[name]) for name in names], style=style)
    return table, legend(names)


def show_comparison(console: Console, run: RunRecord) -> None:
    """Print heading, table, the reasons for missing plans, and the certificate of the best plan."""
    result = run.result
    show_heading(console, result, counted(len(run.attempts), "strategy"))
    if run.graph is not None and run.cluster is not None:
        batch = f", mini-batch {run.plan.minibatch_size}" if run.plan else ""
        console.print(
            f"{counted(run.graph.num_ops, 'operator')} on {counted(run.cluster.num_devices, 'device')}{batch}",
            style="dim",
        )
    table, meanings = compare_table(run, console.width)
    console.print(table)
    console.print(meanings, style="dim")
    for line in reason_lines(run.attempts):
        console.print(Text(line, style="yellow"))
    for kind, line in best_lines(strategy_lines(run.attempts, run.judged.bound)):
        words = [text.seconds(line.attempt.iteration_s), line_worth_words(run, line)]
        console.print(Text.assemble(f"{kind}: ", (line.attempt.strategy, "bold green"), *(f", {each}" for each in words if each)))
