"""What the terminal shows: the plan, a progress bar, the result, a comparison of many runs.

Only the controller prints. Colours follow `NO_COLOR` and vanish in pipes (rich does both).
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, Self

from rich import box
from rich.console import Console, Group
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from gpp.program.kinds import BACKWARD, FORWARD
from gpp.report import text
from gpp.report.comparison import certificate
from gpp.report.figures import emulation_words, pass_seconds, run_figures, stage_memory
from gpp.report.record import RunRecord
from gpp.report.stage_graph import device_words, module_names, run_words

if TYPE_CHECKING:
    from rich.progress import Progress

PIPE_WIDTH = 120
WIDE = 110


def make_console(file: IO[str] | None = None, width: int | None = None, quiet: bool = False) -> Console:
    """The console of a run; in a pipe 120 columns wide (or `COLUMNS`), so that no table is cut to 80."""
    console = Console(file=file, width=width, quiet=quiet, highlight=False)
    if width is not None or console.is_terminal:
        return console
    columns = os.environ.get("COLUMNS", "")
    given = int(columns) if columns.isdigit() else 0
    return Console(file=file, width=given or PIPE_WIDTH, quiet=quiet, highlight=False)


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


def plan_table(run: RunRecord, width: int = PIPE_WIDTH) -> Table:
    """The stages: what each holds, where, in what portions, what it takes and needs (as predicted)."""
    if run.plan is None or run.graph is None:
        raise ValueError("a run without a plan has no plan table")
    wide = width >= WIDE
    columns = [("stage", "right"), ("holds", "left"), ("devices", "left"), ("b", "right"), ("in flight", "right")]
    columns += [("forward", "right"), ("backward", "right")] if wide else [("f/b ms", "right")]
    special = max(len(run_words(stage)) for stage in run.plan.stages)
    columns += [("memory", "right"), *([("of limit", "right")] if wide or not special else [])]
    columns += [*([("next", "left")] if wide else []), *([("operators", "left")] if special else [])]
    table = new_table("", *columns)
    passes = pass_seconds(run.predicted)
    room = max(16, width - (90 if wide else 64) - (special + 3 - (0 if wide else 10) if special else 0))
    for s, stage in enumerate(run.plan.stages):
        used, limit = stage_memory(run, s, run.predicted)
        names = module_names(run.plan, run.graph, s)
        times = [text.seconds(passes.get((s, k))) for k in (FORWARD, BACKWARD)]
        if not wide:
            times = ["/".join(text.significant(passes[s, k] * 1e3) if (s, k) in passes else "–" for k in (FORWARD, BACKWARD))]
        row = [
            f"s{s}",
            _names(names, room),
            device_words(stage),
            str(stage.microbatch_size),
            str(stage.in_flight),
            *times,
            text.num_bytes(used),
            *([text.percent(text.quotient(used, limit))] if wide or not special else []),
        ]
        row += [text.ranges(run.plan.successors[s], "s") or "–"] if wide else []
        row += [run_words(stage)] if special else []
        table.add_row(*[escape(cell) for cell in row])
    return table


def _names(names: Sequence[str], room: int) -> str:
    """As many names as fit into `room` characters, then how many more there are."""
    for count in range(len(names), 0, -1):
        rest = f" +{len(names) - count}" if count < len(names) else ""
        joined = ", ".join(names[:count]) + rest
        if len(joined) <= room:
            return joined
    rest = f" +{len(names) - 1}" if len(names) > 1 else ""
    return text.shorten_path(names[0], room - len(rest)) + rest


def show_plan(console: Console, run: RunRecord) -> None:
    """Print heading, plan table, the planner's words, and the prediction beside the baselines'."""
    result, plan = run.result, run.plan
    console.print(
        Text.assemble(
            (str(result.get("model")), "bold"),
            " · ",
            (str(result.get("strategy")), "bold cyan"),
            f" · {result.get('cluster')} · {result.get('engine')}",
        )
    )
    if plan is None:
        return
    count = len(plan.stages)
    console.print(
        f"{count} stage{'s' * (count != 1)} on {plan.num_devices} devices, depth {plan.depth}, mini-batch {plan.minibatch_size}, "
        f"planned in {text.seconds(plan.search_s)}",
        style="dim",
    )
    if run.graph is not None:
        console.print(plan_table(run, console.width))
    words = Table.grid(padding=(0, 1))
    for line in plan.explanation:
        words.add_row("•", Text(line))
    console.print(words)
    console.print(prediction_lines(run))


def prediction_lines(run: RunRecord) -> Group:
    """The prediction, then one line for every baseline with the speed-up over it."""
    if run.predicted is None:
        return Group()
    own = run.predicted.metrics
    lines: list[Text | Padding] = [
        Text.assemble(
            "predicted  ",
            (text.seconds(own.iteration_s), "bold"),
            f" per step, {text.significant(own.throughput_samples_per_s)} samples/s, bubble {text.percent(own.bubble_fraction)}",
        )
    ]
    for name, metrics in run.baseline_predicted.items():
        speedup = text.quotient(metrics.iteration_s, own.iteration_s)
        style = "green" if speedup is not None and speedup > 1 else "yellow"
        lines.append(
            Text.assemble(
                f"           {name}: {text.seconds(metrics.iteration_s)}, bubble {text.percent(metrics.bubble_fraction)}: ",
                (f"{text.ratio(speedup)} as fast as {name}", style),
            )
        )
    if words := certificate(run.plan, own, run.bound):
        lines.append(Padding(Text(words), (0, 0, 0, 11)))
    return Group(*lines)


def show_result(console: Console, run: RunRecord, paths: Sequence[tuple[str, object]] = (), hints: Iterable[str] = ()) -> None:
    """Print how the run ended: figures, loss, warnings, where things are.

    Args:
        paths: (what, path), as in `("report", ".../report.html")`.
        hints: further command lines, as a logger's.
    """
    status, reason = str(run.result.get("status")), run.result.get("reason")
    if run.compared:
        reason = "no strategy has a plan; the reasons are above"
    if status != "ok":
        console.print(
            Text.assemble((status, "bold red" if status == "failed" else "bold yellow"), f": {reason or 'no reason given'}")
        )
    if (run.predicted or run.measured) and not run.compared:
        both = [("measured", "right"), ("ratio", "right")] if run.measured else []
        table = new_table("", ("", "left"), ("predicted", "right"), *both)
        for figure in run_figures(run):
            measured = [Text(figure.show(figure.measured), style="bold"), text.ratio(figure.ratio)] if run.measured else []
            table.add_row(figure.name, figure.show(figure.predicted), *measured)
        console.print(table)
    if words := emulation_words(run):
        console.print(words)
    known = [v for v in run.losses if v is not None]
    if known:
        since = f", from step {run.first_step} on" if run.first_step else ""
        console.print(f"loss {text.significant(known[0], 4)} → {text.significant(known[-1], 4)} in {len(run.losses)} steps{since}")
    for name, value in run.result.get("final_metric", {}).items():
        console.print(f"{escape(name)} {text.significant(value, 4)}")
    for warning in run.warnings:
        console.print(Text(f"warning: {warning}", style="yellow"))
    width = max((len(what) for what, _ in paths), default=0)
    for what, path in paths:
        console.print(Text(f"{what:<{width}}  {path}"), soft_wrap=True)
    for hint in hints:
        console.print(Text(hint, style="dim"), soft_wrap=True)


def comparison_table(results: Sequence[dict[str, Any]], width: int = PIPE_WIDTH) -> Table:
    """Many runs beside one another: result.json dicts, the speed-up over `sequential` on the same model, cluster and engine."""
    wide = width >= WIDE
    columns = [("strategy", "left"), ("model", "left"), ("predicted", "right"), ("measured", "right"), ("vs seq.", "right")]
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
            peaks = [v for v in (best.get("peak_memory_bytes") or {}).values() if v is not None]
            depth = (result.get("plan") or {}).get("depth")
            row += [
                text.percent(best.get("bubble_fraction")),
                text.num_bytes(max(peaks, default=None)),
                "–" if depth is None else str(depth),
            ]
        style = {"ok": "green", "infeasible": "yellow"}.get(status, "red")
        table.add_row(*[escape(cell) for cell in row], Text(status + _why(result, 90 if wide else 40), style=style))
    return table


def _why(result: dict[str, Any], length: int) -> str:
    """The first words of the reason of a run that is not ok."""
    reason = str(result.get("reason") or "")
    if result.get("status") == "ok" or not reason:
        return ""
    first = reason.splitlines()[0]
    return f": {first if len(first) <= length else first[: length - 1] + '…'}"


def _speedup(result: dict[str, Any], results: Sequence[dict[str, Any]]) -> float | None:
    """Measured where both are measured, else predicted."""

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


class StepProgress:
    """A progress bar in a terminal, one line every `every_s` seconds elsewhere.

    Example:
        >>> with StepProgress(console, total=100) as progress:  # doctest: +SKIP
        ...     progress.update(step=1, loss=2.3, samples_per_s=120.0)
    """

    def __init__(self, console: Console, total: int, *, every_s: float = 5.0) -> None:
        self._console, self._total, self._every_s = console, total, every_s
        self._began = self._printed = time.monotonic()
        self._line = self._said = ""
        self._first: tuple[int, float] | None = None
        self._bar: Progress | None = None
        if console.is_terminal and not console.is_dumb_terminal:
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = [
                TextColumn("step"),
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
            loss: of the last step; None where there is none (inference, emulation).
            samples_per_s: throughput.
        """
        facts = ([] if loss is None else [f"loss {text.significant(loss, 4)}"]) + (
            [] if samples_per_s is None else [f"{text.significant(samples_per_s)} samples/s"]
        )
        if self._bar:
            self._bar.update(self._task, completed=step, facts="  ".join(facts))
            return
        now = time.monotonic()
        # From the first step seen: what came before it was the start of the workers.
        self._first = self._first or (step, now)
        first, since = self._first
        left = [f"{text.seconds((now - since) / (step - first) * (self._total - step))} left"] if step > first else []
        when = left if step < self._total else [f"in {text.seconds(now - self._began)}"]
        self._line = "  ".join([f"step {step}/{self._total}", *facts, *when])
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
