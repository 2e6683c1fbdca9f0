"""PLAN.md: what a plan is, what it is predicted to take, and what its engine does otherwise."""

from __future__ import annotations

from collections.abc import Sequence

from gpp.errors import counted
from gpp.export.base import AbstractExporter, Exported, Lost, ToExport
from gpp.graph.captured import Captured
from gpp.graph.op_graph import dtype_bytes
from gpp.report.draw import text
from gpp.report.draw.stage_graph import device_words, module_names, operator_words
from gpp.report.run.key_figures import certificate
from gpp.timeline import Timeline


def plan_page(exporter: AbstractExporter, asked: ToExport, e: ToExport, made: Exported, why: str | None) -> str:
    """The text of PLAN.md.

    Args:
        asked: the plan that the strategy made.
        e: the plan that was written.
        why: why it is another one; None where it is not.
    """
    ran = made.ran
    predicted = ran.strategy.predict(ran.plan, ran.problem)
    step_s, samples = predicted.metrics.iteration_s, e.plan.minibatch_size
    lines = [
        f"# {e.model} for {exporter.engine}",
        "",
        f"    {made.command}",
        "",
        f"{counted(len(e.plan.stages), 'stage')} on {counted(len(e.plan.devices), 'device')} of {e.problem.cluster.name}, "
        f"micro-batches of {e.plan.stages[0].microbatch_size} of {samples} samples, "
        f"schedule {e.strategy.schedule.name}, planned by {e.plan.planner}.",
        "",
        *_nearest(asked, step_s, why),
        "## Predicted",
        "",
        *_table(("", ""), _figures(e, predicted)),
        "",
        "## Stages",
        "",
        *_table(("stage", "modules", "devices", "in flight", "next"), _stages(e)),
        "",
        "## Memory of each rank, predicted",
        "",
        *_table(("rank", "device", *FILLS, "peak", "of"), _memory(ran, predicted)),
        "",
        "## What the engine does otherwise",
        "",
        *([f"* {_lost(each, step_s)}" for each in made.lost] or ["Nothing: it runs this plan as it is."]),
        *["", *made.notes][: 2 * len(made.notes)],
        "",
    ]
    return "\n".join(lines)


FILLS = ("weights, gradients, optimizer", "activations in flight", "at work")
"""What fills a device; the peak is less where not all of it is there at once."""


def _figures(e: ToExport, predicted: Timeline) -> list[tuple[str, str]]:
    metrics = predicted.metrics
    out = [("step", text.seconds(metrics.iteration_s)), ("samples a second", text.significant(metrics.throughput_samples_per_s))]
    if (tokens := tokens_of(e.captured)) is not None:
        out.append(("tokens a second", text.significant(tokens * metrics.throughput_samples_per_s)))
    if (share := flops_used(e, metrics.iteration_s)) is not None:
        out.append(("FLOP/s of the devices' peak (MFU)", text.percent(share)))
    out.append(("idle", text.percent(metrics.bubble_fraction)))
    words = certificate(e.plan, metrics, e.bound)
    return [*out, ("distance from the best plan", words or "not known")]


def tokens_of(captured: Captured) -> int | None:
    """Tokens of a sample: the length of the model's only input of integers; None where there is none."""
    rows = [n for n in captured.nodes if n.kind == "input" and not n.target.startswith(("target:", "items:"))]
    whole = [n for n in rows if n.shape is not None and len(n.shape) == 2 and (n.dtype or "").startswith("int")]
    lengths = {int(size) for n in whole for i, size in enumerate(n.shape or ()) if i != n.batch_dim and isinstance(size, int)}
    return lengths.pop() if len(lengths) == 1 else None


def flops_used(e: ToExport, step_s: float) -> float | None:
    """The model's own floating-point operations a second over the peak of the devices used; None where no peak is known."""
    graph, dtype = e.problem.graph, e.problem.cost.product_type(e.problem.graph)
    peaks = [e.problem.cluster.devices[d].peak_flop_per_s.get(dtype) for d in e.plan.devices]
    if not all(peaks) or step_s <= 0 or dtype_bytes(dtype) == 0 or any(peak and peak <= 1.0 for peak in peaks):
        return None
    work = e.plan.minibatch_size * sum(op.forward_flops + op.backward_flops for op in graph.ops)
    return work / step_s / sum(peak for peak in peaks if peak) if work else None


def _stages(e: ToExport) -> list[tuple[str, ...]]:
    out = []
    for s, stage in enumerate(e.plan.stages):
        names = ", ".join(module_names(e.plan, e.problem.graph, s))
        said = operator_words(stage)
        after = text.ranges(e.plan.successors[s], "s") or "–"
        out.append((f"s{s}", f"{names} ({said})" if said else names, device_words(stage), str(stage.in_flight), after))
    return out


def _memory(ran: ToExport, predicted: Timeline) -> list[tuple[str, ...]]:
    """A row for each device: what fills it, its peak, and its size."""
    plan, posed, out = ran.plan, ran.strategy.posed(ran.problem), []
    bills, holds, held = plan.bills(posed), posed.regime.holds, predicted.metrics.max_in_flight_samples
    for rank, device in enumerate(plan.devices):
        fills = [0.0, 0.0, 0.0]
        for s in plan.stages_of_device.get(device, ()):
            memory, full = bills[s].memory, -(-held.get(s, plan.stages[s].in_flight) // plan.stages[s].unit)
            fills[0] += memory.static + memory.versions
            fills[1] += memory.microbatch * full + memory.late * plan.late(s, holds)
            fills[2] += memory.transient
        peak, size = predicted.metrics.peak_memory_bytes.get(device), ran.problem.cluster.devices[device].memory_bytes
        out.append((str(rank), f"d{device}", *map(text.num_bytes, fills), text.num_bytes(peak), text.num_bytes(size)))
    return out


def _nearest(asked: ToExport, step_s: float, why: str | None) -> list[str]:
    if why is None:
        return []
    before = asked.step_s()
    more = text.percent(step_s / before - 1) if before > 0 else "–"
    return [
        f"This is the nearest plan that the engine can run. The one of {asked.plan.planner} takes {text.seconds(before)} a step, "
        f"this one {text.seconds(step_s)}: {more} more. Of the other: {why.partition(' Fix: ')[0]}",
        "",
    ]


def _lost(each: Lost, step_s: float) -> str:
    if each.seconds is None:
        return f"{each.what}."
    before = step_s - each.seconds
    share = f", {text.percent(each.seconds / before)} of it" if before > 0 else ""
    return f"{each.what}: {text.seconds(each.seconds)} more a step{share}."


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", *(f"| {' | '.join(row)} |" for row in rows)]
