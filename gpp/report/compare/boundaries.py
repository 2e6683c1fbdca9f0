"""The largest micro-batches of several strategies, as text and numbers: the same for terminal, page and result.json."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.text import Text

from gpp.analysis.max_batch import LargestMicrobatch
from gpp.errors import counted
from gpp.report.draw import text
from gpp.report.draw.page import Cell, Column, PageTable
from gpp.report.run.console import new_table, show_heading, with_room
from gpp.report.run.record import RunRecord
from gpp.report.run.result import peak_memory

WORDS = ("strategy", "on workers")
FIRST_TO_GO = ("micro-batches", "samples/s", "memory", "step")
"""Columns that give way in a narrow terminal, in this order."""
LEGEND = (
    "The number of micro-batches of a mini-batch stays; the mini-batch grows with b, the samples of a micro-batch. Refused: the "
    "next size that was tried, for which there is no plan."
)


def cells(boundary: LargestMicrobatch) -> dict[str, str]:
    """Every column's text by its name."""
    metrics, found = boundary.best.predicted and boundary.best.predicted.metrics, boundary.confirmed
    out = {
        "strategy": boundary.strategy,
        "largest b": str(boundary.microbatch_size) if boundary.microbatch_size else "–",
        "refused": "–" if boundary.beyond is None else str(boundary.beyond),
        "micro-batches": str(boundary.microbatches),
        "mini-batch": str(boundary.microbatch_size * boundary.microbatches) if boundary.microbatch_size else "–",
        "samples/s": text.significant(metrics.throughput_samples_per_s) if metrics else "–",
        "step": text.seconds(metrics.iteration_s) if metrics else "–",
        "memory": text.num_bytes(peak_memory(metrics)),
    }
    if found is not None:
        at = f"ran, {text.percent(found.peak_share)} of memory" if found.at == "ok" else "did not run"
        out["on workers"] = f"{at}; {found.size} {'ran, too' if found.beyond == 'ok' else 'was stopped'}"
    return out


def _rows(boundaries: Sequence[LargestMicrobatch]) -> tuple[list[str], list[list[str]]]:
    """Names of the columns, and a row of texts for each strategy."""
    found = [cells(boundary) for boundary in boundaries]
    names = list(max(found, key=len))
    return names, [[each.get(name, "–") for name in names] for each in found]


def boundary_table(boundaries: Sequence[LargestMicrobatch]) -> PageTable | None:
    """The table of a page; None where no boundary was looked for."""
    if not boundaries:
        return None
    names, rows = _rows(boundaries)
    looks: list[list[str | Cell]] = [list(row) for row in rows]
    return PageTable(columns=[Column(name=name, kind="" if name in WORDS else "n") for name in names], rows=looks)


def ends(boundaries: Sequence[LargestMicrobatch]) -> list[str]:
    """A line for each strategy: why the next size is refused, and how runs ended."""
    out = []
    for boundary in boundaries:
        if boundary.reason and boundary.microbatch_size:
            out.append(f"{boundary.strategy}, b={boundary.beyond}: {boundary.reason.splitlines()[0]}")
        if found := boundary.confirmed:
            ran = ((boundary.microbatch_size, found.at), (found.size, found.beyond))
            out += [f"{boundary.strategy}, b={size} on workers: {end}" for size, end in ran if end != "ok"]
    return out


def show_boundaries(console: Console, run: RunRecord) -> None:
    """Print heading, table, and why each strategy's next size is refused."""
    show_heading(console, run.result, f"largest micro-batches of {counted(len(run.boundaries), 'strategy')}")
    every, rows = _rows(run.boundaries)
    found = [dict(zip(every, row, strict=True)) for row in rows]
    names = with_room(found, FIRST_TO_GO, console.width)
    table = new_table("", *((name, "left" if name in WORDS else "right") for name in names))
    table.columns[0].no_wrap = True
    for each in found:
        table.add_row(*(escape(each[name]) for name in names))
    console.print(table)
    console.print(LEGEND, style="dim")
    for line in ends(run.boundaries):
        console.print(Text(line, style="dim"))
