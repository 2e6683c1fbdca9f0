"""The terminal's view of a run: the plan and the result."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console, Group
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from gpp.analysis.gains import judged_s
from gpp.errors import counted
from gpp.report.draw import text
from gpp.report.run.console import PIPE_WIDTH, WIDE, new_table, show_heading
from gpp.report.run.gain_words import gain_lines, one_stage_lines
from gpp.report.run.key_figures import emulation_words, run_figures, worth_words
from gpp.report.run.record import RunRecord
from gpp.report.run.stages import stage_lines
from gpp.timeline import Metrics

LEGEND = (
    "b: samples of a micro-batch. in flight: samples whose activations a stage holds at most. forward, backward (f/b): of one "
    "micro-batch. memory: its device's fullest moment, as predicted."
)
"""Below the table of a plan."""


def plan_table(run: RunRecord, width: int = PIPE_WIDTH) -> Table:
    """A row for every stage of the run's plan, with the columns for which there is room."""
    lines = stage_lines(run)
    wide, special = width >= WIDE, max(len(line.operators) for line in lines)
    columns = [("stage", "right", "stage"), ("holds", "left", "modules"), ("devices", "left", "devices")]
    columns += [("b", "right", "micro-batch"), ("in flight", "right", "in flight")]
    columns += [("forward", "right", "forward"), ("backward", "right", "backward")] if wide else [("f/b ms", "right", "f/b ms")]
    columns += [("memory", "right", "peak memory"), *([("of limit", "right", "of limit")] if wide else [])]
    columns += [*([("next", "left", "next stages")] if wide else []), *([("operators", "left", "operators")] if special else [])]
    table = new_table("", *((heading, justify) for heading, justify, _ in columns))
    room = max(16, width - (90 if wide else 54) - (special + 3 if special else 0))
    for line in lines:
        both_ms = "/".join("–" if s is None else text.significant(s * 1e3) for s in (line.forward_s, line.backward_s))
        cells = {**line.cells(), "modules": _names(line.modules, room), "f/b ms": both_ms}
        table.add_row(*[escape(cells[name]) for *_, name in columns])
    return table


def _names(names: Sequence[str], room: int) -> str:
    """As many names as fit into `room` characters, then the number of the others."""
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
    show_heading(console, result, f"strategy {result.get('strategy')}")
    if plan is None:
        return
    where = f"{counted(len(plan.stages), 'stage')} on {counted(plan.num_devices, 'device')}, depth {plan.depth}"
    console.print(f"{where}, mini-batch {plan.minibatch_size}, planned in {text.seconds(plan.search_s)}", style="dim")
    if words := checked_words(result.get("checked")):
        console.print(Text(words), style="dim")
    if run.graph is not None:
        console.print(plan_table(run, console.width))
        console.print(LEGEND, style="dim")
    words = Table.grid(padding=(0, 1))
    for line in plan.explanation:
        words.add_row("•", Text(line))
    why, command = one_stage_lines(run.judged.one_stage, run.asked.command) if run.judged.one_stage else ("", "")
    if why:
        words.add_row("•", Text(why))
    console.print(words)
    if command:
        console.print(Text(f"  {command}"), soft_wrap=True)  # a line to copy
    console.print(prediction_lines(run))


def checked_words(checked: Mapping[str, Any] | None) -> str:
    """That the captured model was compared with the user's own module, or why not; empty for a model that is not captured."""
    if checked is None:
        return ""
    took = f"captured in {text.seconds(checked['capture_s'])}"
    if checked["unknown"] is not None:
        return f"{took}, not compared with the module itself: {checked['unknown']}"
    return f"{took}, compared with the module itself in {text.seconds(checked['seconds'])}: equal"


def _beside(metrics: Metrics) -> str:
    """What these seconds are, and the figures beside them."""
    what = f"{text.significant(metrics.throughput_samples_per_s)} samples/s, bubble {text.percent(metrics.bubble_fraction)}"
    course = metrics.course
    if course is not None and course.latency_s is not None:
        return f"{course.latency_words}, {text.significant(course.rate)} {course.many}/s, {what}"
    return f"per {metrics.one}, {what}"


def prediction_lines(run: RunRecord) -> Group:
    """The prediction, then one line for every baseline with the speed-up over it."""
    if run.predicted is None:
        return Group()
    own = run.predicted.metrics
    lines: list[Text | Padding] = [Text.assemble("predicted  ", (text.seconds(judged_s(own)), "bold"), f" {_beside(own)}")]
    for name, metrics in run.judged.baseline.items():
        speedup = text.quotient(judged_s(metrics), judged_s(own))
        style = "green" if speedup is not None and speedup > 1 else "yellow"
        lines.append(
            Text.assemble(
                (f"           {text.ratio(speedup)} as fast as {name}", style),
                f", which takes {text.seconds(judged_s(metrics))}, bubble {text.percent(metrics.bubble_fraction)}",
            )
        )
    if words := worth_words(run, run.judged.bound):
        lines.append(Padding(Text(words), (0, 0, 0, 11)))
    return Group(*lines)


def show_result(
    console: Console,
    run: RunRecord,
    paths: Sequence[tuple[str, object]] = (),
    hints: Iterable[str] = (),
) -> None:
    """Print the end of the run: status, figures, loss, warnings, paths.

    Args:
        paths: (name, path), as in `("report", ".../report.html")`.
        hints: further command lines, for example a logger's.
    """
    status, reason = str(run.status), run.reason
    if run.attempts:
        reason = "no strategy has a plan; the reasons are above"
    if status != "ok":
        console.print(
            Text.assemble((status, "bold red" if status == "failed" else "bold yellow"), f": {reason or 'no reason given'}")
        )
    if (run.predicted or run.measured) and not run.attempts:
        both = [(run.source, "right"), ("ratio", "right")] if run.measured else []
        table = new_table("", ("", "left"), ("predicted", "right"), *both)
        for figure in run_figures(run):
            measured = [Text(figure.show(figure.measured), style="bold"), text.ratio(figure.ratio)] if run.measured else []
            table.add_row(figure.name, figure.show(figure.predicted), *measured)
        console.print(table)
    if words := emulation_words(run):
        console.print(words)
    known = [v for v in run.outcome.losses if v is not None]
    if known:
        since = f", from step {run.first_step} on" if run.first_step else ""
        over = f"in {counted(len(run.outcome.losses), 'step')}{since}"
        console.print(f"loss {text.significant(known[0], 4)} → {text.significant(known[-1], 4)} {over}")
    course = run.predicted and run.predicted.metrics.course
    whose = f"{course.made}:" if course else "held-out"
    for name, value in run.result.get("final_metric", {}).items():
        console.print(f"{whose} {escape(name)} {text.significant(value, 4)}")
    width = max((len(what) for what, _ in paths), default=0)
    for what, path in paths:
        console.print(Text(f"{what:<{width}}  {path}"), soft_wrap=True)
    for hint in hints:
        console.print(Text(hint, style="dim"), soft_wrap=True)
    if run.judged.gains and run.judged.gains.gains and status == "ok":
        gained, *reasons = gain_lines(run.judged.gains)
        for line in reasons:
            console.print(Text(line))
        # The last line of a run is what was gained.
        console.print(Text(gained, style="bold"))
