"""Drawings as files of their own: SVG with every colour written out, which any viewer shows as it is."""

from __future__ import annotations

from collections.abc import Sequence

from gpp.graph.op_graph import OpGraph
from gpp.plan.plan import Plan
from gpp.report.draw.palette import branch_of, literal, tone
from gpp.report.draw.stage_graph import draw_stage_graph, hatch_definition
from gpp.report.draw.svg import standalone
from gpp.report.draw.timelines import draw_timelines, rows_of
from gpp.timeline import Timeline


def stage_graph_picture(plan: Plan, graph: OpGraph, branches: Sequence[int | None] = ()) -> str:
    """The stage graph as an SVG file.

    Args:
        branches: for each operator, its branch; () where unknown.
    """
    return _with_hatch(draw_stage_graph(plan, graph, tuple(branches) or (None,) * graph.num_ops))


def timelines_picture(
    named: Sequence[tuple[str, Timeline]], plan: Plan, graph: OpGraph, branches: Sequence[int | None] = ()
) -> str:
    """Timelines on one scale as an SVG file.

    Args:
        named: heading and timeline, from top to bottom.
    """
    known = tuple(branches) or (None,) * graph.num_ops
    tones = {s: tone(branch_of(stage, graph, known)) for s, stage in enumerate(plan.stages)}
    return _with_hatch(draw_timelines(named, rows_of(plan.stages_of_device, tones, [timeline for _, timeline in named])))


def _with_hatch(svg: str) -> str:
    """A drawing with the definitions that its fills and arrows refer to."""
    head, _, rest = standalone(svg).partition(">")
    return f"{head}>{_definitions()}{rest}"


def _definitions() -> str:
    """Hatch and arrow, with their colours written out."""
    definitions = hatch_definition()
    return literal(definitions[definitions.index("<defs>") : definitions.index("</svg>")])
