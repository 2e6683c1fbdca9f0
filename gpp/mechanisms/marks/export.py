"""Recomputation, for the engines of others: of every layer, or of none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final, final

from gpp.errors import UnsupportedPlan, counted
from gpp.export.base import AbstractExportPart, Told
from gpp.mechanisms.marks.stage import Marks
from gpp.plan.plan import Plan

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


EXPORT = MarksExport()
