"""The record of one run, from which its reports are made."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpp.analysis.comparison import Attempt
    from gpp.analysis.explain.explanation import Explanation
    from gpp.analysis.explore import Explored
    from gpp.analysis.gains import Gains
    from gpp.analysis.max_batch import Boundary
    from gpp.analysis.one_stage import OneStage
    from gpp.cluster import Cluster
    from gpp.graph.op_graph import OpGraph
    from gpp.plan.plan import Plan
    from gpp.planners.bounds.lower_bound import Bound
    from gpp.timeline import Emulation, Metrics, Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """One run that is finished, infeasible or failed; in the last two cases it may lack a plan and timelines.

    Args:
        result: the contract's result.json as a dict (see `gpp.report.run.result`).
        branches: for each operator, its branch, or None for the trunk; () where unknown.
        losses: one value per step, from `first_step` on.
        evals: `{"step": int, name: value, ...}` for every evaluation.
        command: the command line that reproduces the run.
        baseline_predicted: other strategies' predictions for the same problem, `sequential` first.
        bound: a time that no plan for the problem can beat.
        explanation: bottleneck, idle time and alternatives of the plan.
        one_stage: why a plan for several devices is one stage.
        gains: what the plan gains over the best chain and over one device.
        compared: attempts of several strategies on one problem; `plan` and `predicted` are then the best one's.
        boundaries: the largest micro-batch of each of them; empty where it was not looked for.
        explored: what was found over a grid of settings; `compared` then has the fastest of each strategy.
        emulation: how `measured` was measured on emulated devices.
    """

    result: dict[str, Any]
    plan: Plan | None = None
    graph: OpGraph | None = None
    cluster: Cluster | None = None
    branches: tuple[int | None, ...] = ()
    predicted: Timeline | None = None
    measured: Timeline | None = None
    losses: list[float] = field(default_factory=list)
    first_step: int = 0
    evals: list[dict[str, float]] = field(default_factory=list)
    warnings: tuple[str, ...] = ()
    command: str = ""
    baseline_predicted: dict[str, Metrics] = field(default_factory=dict)
    bound: Bound | None = None
    explanation: Explanation | None = None
    one_stage: OneStage | None = None
    gains: Gains | None = None
    compared: tuple[Attempt, ...] = ()
    boundaries: tuple[Boundary, ...] = ()
    explored: Explored | None = None
    emulation: Emulation | None = None

    @property
    def source(self) -> str:
        """What readers are told that `measured` is: on emulated devices nothing is measured of the devices that it is about."""
        return "emulated" if self.emulation is not None else "measured"
