"""A plan as a table of text; that with names, seconds and bytes, for which a plan is not enough, is `gpp.report.run.terminal`'s."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpp.plan.plan import Plan

HEADINGS = ("stage", "operators", "devices", "micro-batch", "in flight", "next")


def table(plan: Plan) -> str:
    """A line of the whole plan, and one for each stage.

    Example:
        sequential: 2 stages on 2 devices, depth 2, mini-batch 16
        stage  operators  devices  micro-batch  in flight  next
        s0     4          d0       4            8          s1
        s1     3          d1       4            4
    """
    rows = [HEADINGS]
    for s, stage in enumerate(plan.stages):
        devices = " ".join(f"d{device}" for device in stage.devices) + " in turn" * (stage.round_robin_degree > 1)
        following = " ".join(f"s{t}" for t in plan.successors[s])
        rows.append((f"s{s}", str(len(stage.ops)), devices, str(stage.microbatch_size), str(stage.in_flight), following))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    count, devices = len(plan.stages), plan.num_devices
    head = f"{plan.planner}: {count} stage{'s' * (count != 1)} on {devices} device{'s' * (devices != 1)}, depth {plan.depth}, "
    return "\n".join([f"{head}mini-batch {plan.minibatch_size}", *lines])
