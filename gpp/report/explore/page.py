"""The page to explore: one file, in which the reader changes settings and sees plan and timeline follow."""

from __future__ import annotations

from gpp.analysis.explore import Explored
from gpp.report.draw.stage_graph import branch_swatches
from gpp.report.draw.svg import Swatch
from gpp.report.draw.timelines import event_swatches
from gpp.report.explore.data import page_data
from gpp.report.run.problem_page import problem_page
from gpp.report.run.record import RunRecord


def explore_report(run: RunRecord, found: Explored) -> str:
    """The page of a grid of settings; self-contained HTML.

    Raises:
        ValueError: the run has no graph.
    """
    graph = run.graph
    if graph is None:
        raise ValueError("a page to explore needs the graph that was planned")
    plans = [(each.plan, each.predicted) for each in found.attempts if each.plan is not None and each.predicted is not None]
    swatches: dict[str, Swatch] = {}
    for plan in {id(plan.stages): plan for plan, _ in plans}.values():
        swatches |= {swatch.words: swatch for swatch in branch_swatches(plan, graph, run.branches)}
    return problem_page(
        "explore.html",
        run,
        title=f"{run.result.get('model')} · explore · {run.result.get('cluster')}",
        facts=[("cluster", run.result.get("cluster")), ("operators", graph.num_ops), ("settings", len(found.points))],
        reason="",
        files=[],
        data=page_data(found, graph, run.branches),
        branch_swatches=list(swatches.values()),
        event_swatches=event_swatches(timeline for _, timeline in plans),
    )
