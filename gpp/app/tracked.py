"""The values of a run for trackers: its summary, its tables and its drawings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from gpp.report.draw.palette import literal
from gpp.report.draw.stage_graph import device_words, draw_stage_graph, hatch_definition
from gpp.report.draw.svg import standalone
from gpp.report.draw.text import quotient
from gpp.report.draw.timelines import device_bubbles, draw_timelines, rows_of
from gpp.report.run.record import RunRecord
from gpp.report.run.result import peak_memory
from gpp.report.run.stages import stage_lines
from gpp.report.run.strategies import strategy_lines
from gpp.timeline import Metrics, Timeline

CHAIN = "sequential"
"""The strategy that a speed-up is over."""


class TableOf(NamedTuple):
    """A table of plain values."""

    name: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]


def summary(run: RunRecord) -> dict[str, Any]:
    """The facts of a run by name, in one level: numbers in seconds, bytes and samples, and words; None where one is not known."""
    result, plan = run.result, run.result.get("plan") or {}
    out: dict[str, Any] = {name: result.get(name) for name in ("status", "reason")}
    out |= {"stages": plan.get("num_stages"), "depth": plan.get("depth"), "devices": plan.get("num_devices")}
    out |= {name: plan.get(name) for name in ("lower_bound_s", "optimality_gap", "search_s")}
    out |= {"prediction_error": result.get("prediction_error"), "speedup_over_sequential": _speedup(run)}
    for source, timeline in (("predicted", run.predicted), ("measured", run.measured)):
        out |= {f"{source}/{name}": value for name, value in _metrics(timeline).items()}
    # What runs are ranked by: measured, or predicted where nothing was to run. A run that has failed has no rank.
    known = _metrics(run.measured or run.predicted) if result.get("status") == "ok" else {}
    out |= {name: known.get(name) for name in ("iteration_s", "samples_per_s", "bubble_fraction") if name in known}
    for row in devices_table(run).rows:
        device, busy, busy_measured, peak, peak_measured, limit = row
        values = {"busy_share": busy if busy_measured is None else busy_measured, "memory_limit_bytes": limit}
        values["peak_memory_bytes"] = peak if peak_measured is None else peak_measured
        out |= {f"worker/{device}/{name}": value for name, value in values.items()}
    out |= {f"final/{name}": value for name, value in (result.get("final_metric") or {}).items()}
    out |= {f"best/{kind}": name for kind, name in (result.get("best") or {}).items()}
    return out


def _metrics(timeline: Timeline | None) -> dict[str, float | None]:
    if timeline is None:
        return {}
    found, course = timeline.metrics, timeline.metrics.course
    out: dict[str, float | None] = {
        "iteration_s": found.iteration_s,
        "samples_per_s": found.throughput_samples_per_s,
        "bubble_fraction": found.bubble_fraction,
        "peak_memory_bytes": peak_memory(found),
        "communication_bytes": found.communication_bytes,
    }
    return out if course is None else out | course.tracked


def _speedup(run: RunRecord) -> float | None:
    """Predicted time of the chain over that of the plan; None where nobody has planned the chain."""
    if run.strategy == CHAIN and run.predicted is not None:
        return 1.0
    compared = {found.strategy: found.predicted.metrics for found in run.attempts if found.predicted}
    chain: Metrics | None = run.judged.baseline.get(CHAIN) or compared.get(CHAIN)
    if chain is None or run.predicted is None:
        return None
    return quotient(chain.iteration_s, run.predicted.metrics.iteration_s)


def tables(run: RunRecord) -> list[TableOf]:
    """The tables that have rows: the plan's stages, its devices, compared strategies, largest micro-batches."""
    found = (stages_table(run), devices_table(run), strategies_table(run), boundaries_table(run))
    return [table for table in found if table.rows]


def stages_table(run: RunRecord) -> TableOf:
    """A row for every stage of the plan."""
    columns = ("stage", "modules", "devices", "micro-batch", "in flight", "forward s", "backward s", "peak bytes", "limit bytes")
    rows = tuple(
        (
            f"s{line.number}",
            ", ".join(line.modules),
            device_words(line.stage),
            line.stage.microbatch_size,
            line.stage.in_flight,
            line.forward_s,
            line.backward_s,
            line.memory_bytes,
            line.limit_bytes,
            ", ".join(f"s{stage}" for stage in line.next_stages),
            line.operators,
        )
        for line in stage_lines(run)
    )
    return TableOf("plan", (*columns, "next stages", "operators"), rows)


def devices_table(run: RunRecord) -> TableOf:
    """A row for every device of the plan: the share of a step in which it computes, and its peak memory."""
    columns = ("device", "busy predicted", f"busy {run.source}", "peak bytes predicted", f"peak bytes {run.source}", "limit bytes")
    of = {} if run.plan is None else run.plan.stages_of_device
    devices, limits = sorted(of), run.cluster.devices if run.cluster else ()
    idle = [device_bubbles(t, devices) if t and t.events else {} for t in (run.predicted, run.measured)]
    peaks: list[Mapping[int, int]] = [t.metrics.peak_memory_bytes if t else {} for t in (run.predicted, run.measured)]
    rows = tuple(
        (
            d,
            *(1.0 - of[d] if d in of else None for of in idle),
            *(of.get(d) for of in peaks),
            limits[d].memory_bytes if d < len(limits) else None,
        )
        for d in devices
    )
    return TableOf("workers", columns, rows)


def strategies_table(run: RunRecord) -> TableOf:
    """A row for every compared strategy."""
    columns = ("strategy", "status", "iteration s", "samples/s", "x best", "bubble", "peak bytes", "stages", "depth", "gap")
    rows = []
    for line in strategy_lines(run.attempts, run.judged.bound):
        metrics, plan = line.metrics, line.attempt.plan
        rows.append(
            (
                line.attempt.strategy,
                line.attempt.status,
                metrics and metrics.iteration_s,
                metrics and metrics.throughput_samples_per_s,
                line.relative,
                metrics and metrics.bubble_fraction,
                peak_memory(metrics),
                plan and len(plan.stages),
                plan and plan.depth,
                line.gap,
                line.attempt.reason,
            )
        )
    return TableOf("strategies", (*columns, "reason"), tuple(rows))


def boundaries_table(run: RunRecord) -> TableOf:
    """A row for every strategy whose largest micro-batch was looked for."""
    rows = tuple((found.strategy, found.microbatch_size, found.beyond, found.reason) for found in run.boundaries)
    return TableOf("largest_microbatch", ("strategy", "micro-batch", "refused", "reason"), rows)


def drawings(run: RunRecord) -> dict[str, str]:
    """Whole SVG files by name: the stage graph, and each timeline; none without a plan and its graph."""
    plan, graph = run.plan, run.graph
    if plan is None or graph is None:
        return {}
    out = {"stage_graph": _with_hatch(draw_stage_graph(plan, graph, run.branches))}
    both = (("predicted", "Predicted", run.predicted), ("measured", run.source.capitalize(), run.measured))
    for name, heading, timeline in both:
        if timeline is not None and timeline.events:
            rows = rows_of(plan, graph, run.branches, [timeline])
            out[f"timeline_{name}"] = _with_hatch(draw_timelines([(heading, timeline)], rows))
    return out


def _with_hatch(svg: str) -> str:
    """A drawing with the definitions that its fills and arrows refer to."""
    head, _, rest = standalone(svg).partition(">")
    hatch = hatch_definition()
    return f"{head}>{literal(hatch[hatch.index('<defs>') : hatch.index('</svg>')])}{rest}"
