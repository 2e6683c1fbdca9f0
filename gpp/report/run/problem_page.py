"""The common parts of pages about one problem: the frame, and the drawings of a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gpp.graph.op_graph import OpGraph
from gpp.plan.plan import Plan
from gpp.report.draw.charts import PAGE_WIDTH
from gpp.report.draw.packed import pack_operators, pack_timelines
from gpp.report.draw.page import embedded, render
from gpp.report.draw.stage_graph import branch_swatches, draw_stage_graph
from gpp.report.draw.timelines import event_swatches, rows_of
from gpp.report.run.record import RunRecord
from gpp.timeline import Timeline


def problem_page(
    template: str,
    run: RunRecord,
    *,
    title: str,
    facts: Sequence[tuple[str, object]],
    reason: str,
    files: Sequence[tuple[str, str]],
    **values: Any,
) -> str:
    """A page with heading, reason, warnings and the command that reproduces it; the template adds the results.

    Args:
        facts: names and values in the line below the heading.
        reason: why the run is not ok; empty where it is.
        files: (path, content in words) of the files beside the page.
        values: further values of the template.
    """
    return render(
        template,
        title=title,
        model=run.asked.model,
        status=str(run.status),
        facts=facts,
        reason=reason,
        warnings=run.warnings,
        command=run.asked.command,
        files=files,
        **values,
    )


def plan_drawings(
    plan: Plan | None,
    graph: OpGraph | None,
    branches: Sequence[int | None],
    timelines: Sequence[tuple[str, Timeline | None]],
    scale_s: float | None = None,
    limits: Mapping[int, float] | None = None,
) -> dict[str, Any]:
    """Stage graph and timelines with their legends, by the names that the templates have for them.

    Args:
        branches: for each operator, its branch; () where unknown.
        timelines: heading and timeline, from top to bottom; timelines without events are left out.
        scale_s: seconds that the width of the timelines stands for, so that several share a scale.
        limits: device -> bytes that it has; None leaves out memory over time.
    """
    out: dict[str, Any] = {
        "stage_graph": "",
        "stage_graph_narrow": "",
        "branch_swatches": (),
        "operators": "",
        "timelines": "",
        "event_swatches": (),
    }
    if plan is not None and graph is not None:
        out |= {
            "stage_graph": draw_stage_graph(plan, graph, branches),
            "stage_graph_narrow": draw_stage_graph(plan, graph, branches, PAGE_WIDTH),
            "branch_swatches": branch_swatches(plan, graph, branches),
            "operators": embedded(pack_operators([[graph.ops[op].name for op in stage.ops] for stage in plan.stages])),
        }
    named = [(heading, timeline) for heading, timeline in timelines if timeline is not None and timeline.events]
    if named:
        drawn = [timeline for _, timeline in named]
        rows = rows_of(plan, graph, branches, drawn)
        out["event_swatches"] = event_swatches(drawn, rows)
        out["timelines"] = embedded(pack_timelines(named, rows, scale_s=scale_s, limits=limits))
    return out
