"""The ways in which a stage's operators run so that it fits: the thin line, cheapest seconds for each byte first."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from gpp.cost.problem import Problem
from gpp.cost.stage import StageCost
from gpp.plan.stage import Stage


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """How the operators of a stage run, and the seconds that it adds to a micro-batch."""

    recompute: tuple[int, ...]
    offload: tuple[int, ...]
    added_s: float


def fit(
    problem: Problem,
    stage: Stage,
    held: int,
    limit_bytes: float,
    *,
    ways: Collection[str],
    selection: str,
    again: Collection[int],
) -> Fit | None:
    """Ways under which the stage's peak fits; None if there are none."""
    saved, base = problem.graph.amounts.saved_bytes, StageCost.of(problem, stage)
    forward_s = problem.op_times(stage.samples, stage.devices[0]).forward_s
    order = sorted((op for op in again if saved[op] > 0), key=lambda op: forward_s[op] / saved[op])
    for count in range(len(order) + 1 if "recompute" in ways else 1):
        marked = replace(stage, recompute=tuple(sorted(order[:count])))
        bill = StageCost.of(problem, marked)
        if bill.memory.peak(held) <= limit_bytes:
            return Fit(recompute=marked.recompute, offload=(), added_s=bill.backward_s - base.backward_s)
    return None
