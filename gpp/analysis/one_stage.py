"""Why a plan for several devices is a single stage: its time beside that of the best pipeline that was found."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import final

from gpp.analysis.comparison import attempt
from gpp.cost.problem import Problem
from gpp.plan.plan import Plan
from gpp.planners.chains.even import Even
from gpp.schedules.one_f_one_b import OneFOneB
from gpp.strategy import Strategy
from gpp.timeline import Metrics


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class OneStage:
    """A single stage beside a pipeline.

    Args:
        plan, own: the single stage, and its prediction.
        pipeline, other: the best pipeline of two stages or more that was found, and its prediction.
        word: of the command line, that asks for that pipeline.
        memory: the largest share of a device's memory that the single stage takes.
    """

    plan: Plan
    own: Metrics
    pipeline: Plan
    other: Metrics
    word: str
    memory: float


def one_stage(strategy: Strategy, problem: Problem, plan: Plan, predicted: Metrics) -> OneStage | None:
    """Why a plan is a single stage; None for a plan of several, and where no pipeline fits, or none is slower."""
    if len(plan.stages) > 1 or problem.cluster.num_devices < 2:
        return None
    ways: dict[str, Strategy] = {}
    if getattr(strategy.planner, "replication", False):
        ways["strategy.planner.replication=false"] = replace(strategy, planner=replace(strategy.planner, replication=False))  # type: ignore[call-arg]
    ways["strategy=even"] = Strategy(name="even", planner=Even(), schedule=OneFOneB())
    found = [(word, attempt(way, problem)) for word, way in ways.items()]
    pipelines = [(word, one) for word, one in found if one.plan is not None and len(one.plan.stages) > 1]
    if not pipelines:
        return None
    word, best = min(pipelines, key=lambda pair: pair[1].iteration_s)
    assert best.plan is not None and best.predicted is not None
    memory = max(
        (peak / problem.cluster.devices[device].memory_bytes for device, peak in predicted.peak_memory_bytes.items()), default=0.0
    )
    return OneStage(plan=plan, own=predicted, pipeline=best.plan, other=best.predicted.metrics, word=word, memory=memory)
