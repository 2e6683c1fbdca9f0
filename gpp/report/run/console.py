"""The console of a run: its width, its tables, its progress bar.

Only the controller prints. Colours follow `NO_COLOR` and vanish in pipes (rich does both).
"""

from __future__ import annotations

import io
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, Self

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType
from rich.control import Control
from rich.segment import ControlType, Segment
from rich.table import Table
from rich.text import Text

from gpp.errors import printable
from gpp.report.draw import text

if TYPE_CHECKING:
    from rich.progress import Progress

PIPE_WIDTH = 120
"""Columns where the output is no terminal and `COLUMNS` is not set."""
WIDE = 110
"""Columns from which on tables show everything."""


class SafeConsole(Console):
    """A console that prints what it is given and never obeys it: a name with escape sequences is written as they are."""

    heard: Callable[[str], None] | None = None
    """Told the plain text of all that is printed, apart from what is passed by."""

    def print(self, *objects: Any, **options: Any) -> None:
        super().print(*objects, **options)
        if self.heard is not None and not all(isinstance(thing, Control) for thing in objects):
            told = io.StringIO()
            SafeConsole(file=told, width=self.width, highlight=False).print(*objects, **options)
            self.heard(told.getvalue())

    def pass_by(self, words: str) -> None:
        """Say on a terminal what goes on; the next line takes its place."""
        if self.is_terminal:
            room = max(0, min(60, self.width - 1))
            super().print(Text(words[:room].ljust(room), style="dim"), end="")
            self.control(Control(ControlType.CARRIAGE_RETURN))

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        for segment in super().render(renderable, options):
            safe = segment.text if segment.control else printable(segment.text)
            yield segment if safe is segment.text or safe == segment.text else Segment(safe, segment.style)


def make_console(file: IO[str] | None = None, width: int | None = None, quiet: bool = False) -> SafeConsole:
    """The console of a run; in a pipe 120 columns wide (or `COLUMNS`), so that no table is cut to 80."""
    console = SafeConsole(file=file, width=width, quiet=quiet, highlight=False)
    if width is not None or console.is_terminal:
        return console
    columns = os.environ.get("COLUMNS", "")
    given = int(columns) if columns.isdigit() else 0
    return SafeConsole(file=file, width=given or PIPE_WIDTH, quiet=quiet, highlight=False)


def new_table(title: str, *columns: tuple[str, str]) -> Table:
    """A table without side borders; columns are (name, `left` or `right`)."""
    table = Table(
        title=title,
        title_style="bold",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),
        header_style="dim",
    )
    for name, justify in columns:
        table.add_column(name, justify="right" if justify == "right" else "left", no_wrap=justify == "right", overflow="fold")
    return table


def with_room(rows: Sequence[Mapping[str, str]], first_to_go: Sequence[str], width: int) -> list[str]:
    """The columns for which a table has room.

    Args:
        rows: a text for each column.
        first_to_go: columns that are left out where there is no room for all, in this order.
    """
    names = list(rows[0])
    for name in first_to_go:
        if sum(max(len(each), *(len(row[each]) for row in rows)) + 2 for each in names) > width and name in names:
            names.remove(name)
    return names


def show_heading(console: Console, result: Mapping[str, Any], subject: object) -> None:
    """Print model, subject, cluster and engine in a line."""
    ends = f" · cluster {result.get('cluster')} · engine {result.get('engine')}"
    console.print(Text.assemble("model ", (str(result.get("model")), "bold"), " · ", (str(subject), "bold cyan"), ends))


class StepProgress:
    """A progress bar in a terminal, one line every `every_s` seconds elsewhere.

    Args:
        one: what is counted.

    Example:
        >>> with StepProgress(console, total=100) as progress:  # doctest: +SKIP
        ...     progress.update(step=1, loss=2.3, samples_per_s=120.0)
    """

    def __init__(self, console: Console, total: int, *, one: str = "step", every_s: float = 5.0) -> None:
        self._console, self._total, self._one, self._every_s = console, total, one, every_s
        self._began = self._printed = time.monotonic()
        self._line = self._said = ""
        self._first: tuple[int, float] | None = None
        self._bar: Progress | None = None
        if console.is_terminal and not console.is_dumb_terminal:
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = [
                TextColumn(one),
                MofNCompleteColumn(),
                BarColumn(bar_width=None),
                TextColumn("{task.fields[facts]}"),
                TimeRemainingColumn(),
            ]
            self._bar = Progress(*columns, console=console, expand=True)
            self._task = self._bar.add_task("", total=total, facts="")

    def __enter__(self) -> Self:
        if self._bar:
            self._bar.start()
        return self

    def update(self, step: int, loss: float | None = None, samples_per_s: float | None = None) -> None:
        """Say that `step` steps are done.

        Args:
            loss: the last step's; None in runs without a loss (emulation, or forwards alone).
            samples_per_s: throughput.
        """
        said = [] if loss is None else [f"loss {text.significant(loss, 4)}"]
        facts = said + ([] if samples_per_s is None else [f"{text.significant(samples_per_s)} samples/s"])
        if self._bar:
            self._bar.update(self._task, completed=step, facts="  ".join(facts))
            return
        now = time.monotonic()
        # The clock starts with the first step seen: the workers' start came before it.
        self._first = self._first or (step, now)
        first, since = self._first
        left = [f"{text.seconds((now - since) / (step - first) * (self._total - step))} left"] if step > first else []
        # At the end the run's own table has the throughput: of a typical step, and not of the last.
        when = [*facts, *left] if step < self._total else [*said, f"in {text.seconds(now - self._began)} with the workers' start"]
        self._line = "  ".join([f"{self._one} {step}/{self._total}", *when])
        if now - self._printed >= self._every_s:
            self._say(now)

    def _say(self, now: float) -> None:
        if self._line != self._said:
            self._console.print(self._line, soft_wrap=True)
        self._printed, self._said = now, self._line

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if self._bar:
            self._bar.stop()
        else:
            self._say(time.monotonic())
