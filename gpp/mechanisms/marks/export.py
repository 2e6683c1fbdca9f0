"""Recomputation, for the engines of others: of every layer, or of none."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final, final

from gpp.cost.problem import Problem
from gpp.errors import UnsupportedPlan, counted
from gpp.export.base import AbstractExportPart, Told
from gpp.export.ways import EngineWay
from gpp.mechanisms.marks.policies import Recompute
from gpp.mechanisms.marks.stage import Marks
from gpp.memory import fits_whole
from gpp.plan.plan import Plan
from gpp.strategy import Strategy

SETTINGS: Final[dict[str, dict[str, Any]]] = {
    "torchtitan": {"activation_checkpoint": "full"},
    "megatron": {"--recompute-granularity": "full", "--recompute-method": "uniform", "--recompute-num-layers": 1},
}


@final
class MarksExport(AbstractExportPart):
    """Engines compute all layers again where the plan has some do so, which fits where the plan does, and takes longer."""

    def told(self, engine: str, plan: Plan) -> Told | None:
        if engine not in SETTINGS:
            return None
        marks = [stage[Marks] for stage in plan.stages]
        for s, mark in enumerate(marks):
            if mark is not None and mark.offload:
                raise UnsupportedPlan(
                    f"stage {s} keeps {counted(len(mark.offload), 'operator')} on the host, for which export={engine} has no "
                    "setting. Fix: strategy/memory=keep, or another policy"
                )
        kept = [
            s for s, (stage, mark) in enumerate(zip(plan.stages, marks, strict=True)) if not mark or mark.recompute != stage.ops
        ]
        if not kept:
            return Told(settings=SETTINGS[engine])
        stages = tuple(stage.having(Marks(recompute=stage.ops, boundaries=stage.ops)) for stage in plan.stages)
        lost = f"recomputation of some operators alone, as in stage {kept[0]}: the engine computes every layer again"
        return Told(settings=SETTINGS[engine], lost=(lost,), plan=replace(plan, stages=stages))

    def ways(self, engine: str, problem: Problem, strategy: Strategy) -> Iterator[EngineWay]:
        if engine in SETTINGS and not strategy.memory.ways and not strategy.planner.keeps and not fits_whole(problem):
            yield EngineWay(
                problem=problem, strategy=replace(strategy, memory=Recompute(selection="all")), expand=lambda plan: plan
            )


EXPORT = MarksExport()
