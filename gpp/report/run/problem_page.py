"""The common parts of pages about one problem: the frame, and the drawings of a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gpp.graph.op_graph import OpGraph
from gpp.plan.plan import Plan
from gpp.report.draw.charts import PAGE_WIDTH
from gpp.report.draw.packed import pack_operators, pack_timelines
from gpp.report.draw.page import embedded, render
from gpp.report.draw.palette import Tone, branch_of, tone
from gpp.report.draw.stage_graph import branch_swatches, draw_stage_graph, hatch_definition, module_names
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
        hatch=hatch_definition(),
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
    tones: dict[int, Tone] = {}
    names: dict[int, str] = {}
    if plan is not None and graph is not None:
        known = tuple(branches) or (None,) * graph.num_ops
        out |= {
            "stage_graph": draw_stage_graph(plan, graph, known),
            "stage_graph_narrow": draw_stage_graph(plan, graph, known, PAGE_WIDTH),
            "branch_swatches": branch_swatches(plan, graph, known),
            "operators": embedded(pack_operators([[graph.ops[op].name for op in stage.ops] for stage in plan.stages])),
        }
        names = {s: ", ".join(module_names(plan, graph, s)) for s in range(len(plan.stages))}
        tones = {s: tone(branch_of(stage, graph, known)) for s, stage in enumerate(plan.stages)}
    named = [(heading, timeline) for heading, timeline in timelines if timeline is not None and timeline.events]
    if named:
        rows = rows_of(plan.stages_of_device if plan else {}, tones, [timeline for _, timeline in named])
        out["event_swatches"] = event_swatches([timeline for _, timeline in named], rows)
        out["timelines"] = embedded(pack_timelines(named, rows, scale_s=scale_s, limits=limits, names=names))
    return out
