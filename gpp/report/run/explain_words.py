"""An explanation in words, the same for the page and the terminal."""

from __future__ import annotations

from typing import NamedTuple

from gpp.analysis.explain.explanation import Explanation
from gpp.analysis.explain.idle import Reason
from gpp.analysis.explain.order import OrderGap
from gpp.analysis.explain.what_if import PlanShape, WhatIf
from gpp.errors import counted
from gpp.report.draw import text
from gpp.report.draw.palette import FETCH, OTHER, REDUCE, UPDATE, token
from gpp.report.draw.stage_graph import module_names
from gpp.report.run.record import RunRecord

SAME = 5e-4
"""Times that differ by a smaller share count as equal."""


class ReasonLook(NamedTuple):
    """How a reason of idle time is shown: its name, that in a narrow terminal, its fill, and what it means."""

    name: str
    short: str
    fill: str
    meaning: str


LOOKS: dict[Reason, ReasonLook] = {
    "runtime": ReasonLook("runtime", "runt.", OTHER, "the runtime begins and ends a pass, and packs and unpacks its messages"),
    "host": ReasonLook("for copies", "copies", FETCH, "a copy to the host or back is not over yet"),
    "fill": ReasonLook("filling", "fill", token("hue0-soft"), "the pipeline fills: before the device's first backward"),
    "data": ReasonLook("for data", "data", token("hue1-mid"), "later, before a forward: a predecessor or its link is slower"),
    "gradient": ReasonLook(
        "for gradients", "grad.", token("hue4-strong"), "later, before a backward: a successor or its link is slower"
    ),
    "drain": ReasonLook(
        "draining", "drain", token("hue5-soft"), "the pipeline drains: after the device's last forward, and after its own end"
    ),
    "peers": ReasonLook("for replicas", "peers", token("hue3-mid"), "the others of its all-reduce are not there yet"),
    "all_reduce": ReasonLook("all-reduce", "reduce", REDUCE, "gradients are summed over the devices that hold the parameters"),
    "update": ReasonLook("update", "update", UPDATE, "the optimizer's step"),
}


def bottleneck_words(explanation: Explanation, run: RunRecord) -> str:
    """The bottleneck, its cause, and the share of the step that it explains."""
    load, step = explanation.bottleneck, explanation.iteration_s
    many = len(explanation.bottlenecks)
    what = f"s{load.stage}"
    if run.plan is not None and run.graph is not None:
        names = module_names(run.plan, run.graph, load.stage)
        held = ", ".join(names[:2]) + (f" +{len(names) - 2}" if len(names) > 2 else "")
        what += f" ({held}) on {text.ranges(run.plan.stages[load.stage].devices, 'd')}"
    others = f", and {many - 1} more stage{'s' * (many > 2)} as slow" if many > 1 else ""
    runtime = f", takes {text.seconds(load.runtime_s)} for its messages and the runtime" if load.runtime_s >= SAME * step else ""
    parts = [
        f"computes {text.seconds(load.compute_s)}{runtime}",
        f"sends or receives {text.seconds(load.transfer_s)} on its busiest link",
        f"reduces and updates {text.seconds(load.all_reduce_s)}",
    ]
    mates: list[int] = []  # the other stages of its fullest device
    if plan := run.plan:
        mates = max(([s for s in plan.stages_of_device[d] if s != load.stage] for d in plan.stages[load.stage].devices), key=len)
    theirs_s = sum(explanation.loads[s].busy_s for s in mates)
    share = f"the other stages there ({text.ranges(mates, 's')}) take {text.seconds(theirs_s)}, " if mates else ""
    rest = max(0.0, step - load.seconds - theirs_s)
    gain = explanation.memory_speedup
    memory = f" and by memory (with twice of it: {text.ratio(gain)} as fast)" if gain else ""
    return (
        f"the bottleneck is {what}{others}, bound by {load.kind}{memory}. It {', '.join(parts)}: "
        f"{text.percent(load.seconds / step if step else None)} of the step; {share}the device waits for {text.seconds(rest)} "
        f"and uses {text.percent(load.memory_share)} of its memory."
    )


def order_words(order: OrderGap) -> str:
    """Words for how far the order of the passes is from the best one."""
    if order.gap <= SAME:
        return "no order of these passes on these devices is faster"
    most, least = ("", "") if order.closed else ("at most ", "at least ")
    best = f"the optimal order of these {order.passes} passes, which takes {least}{text.seconds(order.bound_s)}"
    return f"{most}{text.percent(order.gap)} from {best}"


def change_words(change: WhatIf) -> str:
    """The gain or loss of a change, as text."""
    if change.speedup is None:
        return "does not fit" if change.reason.startswith("does not fit") else "no plan"
    if abs(change.speedup - 1) <= SAME:
        return "no change"
    if change.speedup >= 1.5:
        return f"{text.ratio(change.speedup)} as fast"
    return f"{text.percent(change.speedup - 1)} faster" if change.speedup > 1 else f"{text.percent(1 / change.speedup - 1)} slower"


def alternatives_heading(explanation: Explanation) -> str:
    """Heading of the other plans for the problem: mostly they are worse."""
    missed = any(change.speedup is not None and change.speedup > 1 + SAME for change in explanation.alternatives)
    return "other plans, of which one is faster" if missed else "next-best plans"


def shape_words(shape: PlanShape) -> str:
    """A plan in a few numbers."""
    sizes = ", ".join(map(str, shape.microbatch_sizes))
    return f"{counted(shape.num_stages, 'stage')}, depth {shape.depth}, {counted(shape.num_devices, 'device')}, b {sizes}"
