"""The page to explore: one file, in which the reader changes settings and sees plan and timeline follow."""

from __future__ import annotations

import json

from gpp.analysis.explore import Explored
from gpp.report.draw.packed import squeeze
from gpp.report.draw.palette import branch_of, tone
from gpp.report.draw.stage_graph import branch_swatches
from gpp.report.draw.svg import Swatch
from gpp.report.draw.timelines import TimelineRows, event_swatches
from gpp.report.explore.data import controls, page_data
from gpp.report.run.problem_page import problem_page
from gpp.report.run.record import RunRecord


def explore_report(run: RunRecord, found: Explored) -> str:
    """The page of a grid of settings; self-contained HTML.

    Raises:
        ValueError: the run has no graph.
    """
    graph, branches = run.graph, run.branches
    if graph is None:
        raise ValueError("a page to explore needs the graph that was planned")
    known = tuple(branches) or (None,) * graph.num_ops
    plans = {id(each.plan): each.plan for each in found.attempts if each.plan is not None}.values()
    swatches: dict[str, Swatch] = {}
    for plan in plans:
        swatches |= {swatch.words: swatch for swatch in branch_swatches(plan, graph, known)}
    tones = dict(enumerate(dict.fromkeys(tone(branch_of(stage, graph, known)) for plan in plans for stage in plan.stages)))
    rows = TimelineRows(devices=(0,), stages_of={0: tuple(tones)}, tones=tones)
    data = page_data(found, graph, branches)
    return problem_page(
        "explore.html",
        run,
        title=f"{run.result.get('model')} · explore · {run.result.get('cluster')}",
        facts=[("cluster", run.asked.cluster), ("operators", graph.num_ops), ("settings", len(found.points))],
        reason="",
        files=[("result.json", "figures of the fastest plans"), ("plans/", "these plans; run one with plan=PATH")],
        scripts=("explore",),
        controls=controls(found),
        data=squeeze(json.dumps(data, separators=(",", ":")).encode()),
        branch_swatches=[swatches[words] for words in sorted(swatches, key=lambda w: (w.startswith("branch"), len(w), w))],
        event_swatches=event_swatches([each.predicted for each in found.attempts if each.predicted], rows),
    )
