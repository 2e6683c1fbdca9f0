"""What a run's page shows of a plan: settings that the reader changes, figures, and drawings."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

from gpp.analysis.comparison import Attempt
from gpp.graph.op_graph import OpGraph
from gpp.plan.plan import Plan
from gpp.planners.base import AbstractPlanner
from gpp.report.draw import text
from gpp.report.draw.charts import PAGE_WIDTH
from gpp.report.draw.packed import pack_timelines
from gpp.report.draw.stage_graph import branch_swatches, draw_stage_graph
from gpp.report.draw.svg import Swatch, escape
from gpp.report.draw.timelines import event_swatches, rows_of
from gpp.schedules.base import AbstractSchedule
from gpp.timeline import Timeline


class Control(NamedTuple):
    """A setting that the reader changes.

    Args:
        key: its name in the page's address.
        words: what the page shows for each of its values.
        new, old: each value in a sentence: with NEW in place of OLD.
        ordered: whether the values have an order, so that a slider suits them.
    """

    key: str
    label: str
    values: Sequence[str]
    words: Sequence[str]
    new: Sequence[str]
    old: Sequence[str]
    ordered: bool


def meaning(choice: AbstractPlanner | AbstractSchedule) -> str:
    """The first sentence of its class's own words; empty where it has none."""
    return " ".join(inspect.cleandoc(type(choice).__doc__ or "").partition("\n\n")[0].split())


def figures(attempt: Attempt) -> dict[str, Any]:
    """What a page says of an attempt beside its drawings: `status`, and the `reason` or its numbers, bare and in words."""
    if attempt.plan is None or attempt.predicted is None:
        return {"status": attempt.status, "reason": attempt.reason}
    metrics = attempt.predicted.metrics
    peak = max(metrics.peak_memory_bytes.values(), default=0)
    return {
        "status": attempt.status,
        "one": metrics.one,
        "step": text.seconds(metrics.iteration_s),
        "idle": text.percent(metrics.bubble_fraction),
        "peak": text.num_bytes(peak),
        "step_s": metrics.iteration_s,
        "bubble": metrics.bubble_fraction,
        "peak_bytes": peak,
    }


def plan_view(plan: Plan, predicted: Timeline, graph: OpGraph, branches: Sequence[int | None]) -> dict[str, Any]:
    """A plan: its drawing, its size, and the words of its planner; its step, as `timeline` of the page's scripts draws it; and the
    legends of the step and of the drawing, as markup."""
    rows = rows_of(plan, graph, branches, [predicted])
    return {
        "plan": {
            "drawing": draw_stage_graph(plan, graph, branches, PAGE_WIDTH),
            "stages": len(plan.stages),
            "depth": plan.depth,
            "words": list(plan.explanation),
        },
        "timeline": pack_timelines([("", predicted)], rows),
        "legends": (
            _legend(event_swatches([predicted], rows)) + "<span>number: micro-batch</span>",
            _legend(branch_swatches(plan, graph, branches)),
        ),
    }


def _legend(swatches: Sequence[Swatch]) -> str:
    return "".join(f"<span>{each.patch}{escape(each.words)}</span>" for each in swatches)
