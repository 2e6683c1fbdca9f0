"""A plan as a table of text. `gpp.report.run.terminal` has the one with names, seconds and bytes: it needs more than a plan."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from gpp import inline
from gpp.stage import Stage

HEADINGS = ("stage", "operators", "devices", "micro-batch", "in flight", "next")


def heading(planner: str, depth: int, minibatch_size: int) -> str:
    """A line for a whole plan."""
    return f"{planner}: depth {depth}, mini-batch {minibatch_size}"


def table(head: str, stages: Sequence[Stage], successors: Sequence[Sequence[int]]) -> str:
    """A line of the whole plan, and one for each stage.

    Args:
        head: what the first line begins with.
        successors: stages that follow each stage.

    >>> print(table("mine: depth 2", plan.stages, plan.successors))
    mine: depth 2
    stage  operators  devices  micro-batch  in flight  next
    s0     1          d0       1            2          s1
    s1     1          d1       1            1
    """
    rows: list[tuple[str, ...]] = [HEADINGS]
    for s, stage in enumerate(stages):
        devices = " ".join([*(f"d{device}" for device in stage.devices), stage.dealt]).rstrip()
        following = " ".join(f"s{t}" for t in successors[s])
        rows.append((f"s{s}", str(len(stage.ops)), devices, str(stage.microbatch_size), str(stage.in_flight), following))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([head, *lines])


def picture(head: str, stages: Sequence[Stage], edges: Sequence[tuple[int, int]]) -> str:
    """The stages of a plan as boxes with arrows, for notebooks; each stands right of all that it waits for."""
    column = [0] * len(stages)
    for s, t in sorted(edges):
        column[t] = max(column[t], column[s] + 1)
    boxes: list[tuple[int, tuple[str, ...]]] = []
    for s, stage in enumerate(stages):
        devices = "d" + ", ".join(map(str, stage.devices))
        sizes = f"micro-batch {stage.microbatch_size}, {stage.in_flight} in flight"
        boxes.append((column[s], (f"s{s}: {len(stage.ops)} operators", devices, sizes)))
    return f"<p>{escape(head)}</p>{inline.stages(boxes, edges, head)}"
