"""The terminal's view of what was measured on this machine: operators, stages in place, fixed costs."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.text import Text

from gpp.cost.models.profiled import MOST_APART, Profiled
from gpp.cost.overheads import NOTHING
from gpp.cost.problem import Problem
from gpp.plan.plan import Plan
from gpp.report.draw import text
from gpp.report.run.console import WIDE, new_table

ROWS = 20
"""Operators that are shown: those that take most of the time."""
LEGEND = (
    "weights: the part of a backward that can be left for later. in halves: both parts' time over that of the backward at once; "
    "whole: where that is so long that schedules leave nothing."
)


def show_profile(console: Console, problem: Problem, plan: Plan) -> None:
    """Print operator times alone and in place, and the fixed costs of this machine."""
    cost = problem.cost
    profile = cost.profile_of(problem.graph, problem.cluster.devices[0]) if isinstance(cost, Profiled) else None
    if profile is None:
        console.print("nothing was measured: cost=profiled measures, on a cluster whose devices are at hand")
        return
    samples = plan.stages[0].samples
    alone, here = profile.alone.at(samples), profile.at(samples)
    seconds = here.forward_s + here.backward_s
    order = sorted(range(len(seconds)), key=lambda op: (-seconds[op], op))
    both = [("in place", "right"), ("", "right")]
    late = [("weights", "right"), ("in halves", "right")] if any(profile.apart) and console.width >= WIDE else []
    room = max(16, console.width - (88 if late else 62))
    table = new_table("", ("operator", "left"), ("forward", "right"), *both, ("backward", "right"), *both, *late)
    for op in order[:ROWS]:
        cells = [escape(text.shorten_path(problem.graph.ops[op].name, room))]
        for before, after in ((alone.forward_s[op], here.forward_s[op]), (alone.backward_s[op], here.backward_s[op])):
            cells += [text.seconds(before), text.seconds(after), text.ratio(text.quotient(after, before))]
        if late:
            # What a backward can leave for later, and how long both passes then take beside the whole.
            ratio, weight_s = profile.apart[op], here.weight_s[op]
            cells.append(text.seconds(weight_s) if weight_s else "")
            cells.append(f"{text.ratio(ratio)}{', whole' * (ratio > MOST_APART)}" if ratio else "")
        table.add_row(*cells)
    cells = [f"all {len(seconds)} operators"]
    for before, after in ((alone.forward_s.sum(), here.forward_s.sum()), (alone.backward_s.sum(), here.backward_s.sum())):
        cells += [text.seconds(before), text.seconds(after), text.ratio(text.quotient(after, before))]
    table.add_section()
    table.add_row(*cells, *((text.seconds(here.weight_s.sum()), "") if late else ()))
    console.print(Text(f"operators on {samples} samples, timed alone, and in place inside {len(profile.in_place)} stages of plans"))
    console.print(table)
    if late:
        console.print(LEGEND, style="dim")
    update = profile.update_per_byte()
    lines = [("load", f"other programs had {text.percent(profile.others)} of the processors while the operators were timed")]
    lines += [] if update is None else [("update", f"{text.seconds(update * 1e6)} for 1 MB of parameters")]
    fixed, link = problem.overheads, problem.cluster.wiring.common
    if fixed != NOTHING:
        lines += [
            (
                "pass",
                f"{text.seconds(fixed.forward_s)} forwards and {text.seconds(fixed.backward_s)} backwards, beside its operators",
            ),
            (
                "message",
                f"{text.seconds(fixed.message_s)} at either end, {text.seconds(fixed.send_s_per_byte * 1e6)} to send 1 MB and "
                f"{text.seconds(fixed.receive_s_per_byte * 1e6)} to receive it; {text.seconds(link.latency_s)} until it is there",
            ),
            (
                "tensor",
                f"{text.seconds(fixed.send_s_per_tensor)} to put each further tensor into a message, "
                f"{text.seconds(fixed.receive_s_per_tensor)} to take it out",
            ),
            ("sum", f"{text.seconds(problem.cluster.allreduce_s(1e6, (0, 1)))} for 1 MB of gradients on two workers"),
            ("step", f"{text.seconds(fixed.step_s)} between two steps"),
            ("answer", f"{text.seconds(fixed.answer_s_per_byte * 1e6)} to write 1 MB of answers to requests"),
        ]
    width = max((len(name) for name, _ in lines), default=0)
    for name, words in lines:
        console.print(Text(f"{name:<{width}}  {words}"))
