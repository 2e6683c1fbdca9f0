"""Split operators, for the engines of others: one degree for all stages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, final

from gpp.cost.problem import Problem
from gpp.errors import UnsupportedPlan
from gpp.export.base import AbstractExportPart, Told
from gpp.export.ways import EngineWay
from gpp.mechanisms.tensor_parallel.searching import splits
from gpp.plan.plan import Plan
from gpp.strategy import Strategy

NAMES: Final = {"torchtitan": "parallelism.tensor_parallel_degree", "megatron": "--tensor-model-parallel-size"}


@final
class TensorParallelExport(AbstractExportPart):
    """The degree, where all stages have the same."""

    def told(self, engine: str, plan: Plan) -> Told | None:
        if engine not in NAMES:
            return None
        degrees = [stage.devices_per_replica for stage in plan.stages]
        other = next((s for s, degree in enumerate(degrees) if degree != degrees[0]), None)
        if other is not None:
            raise UnsupportedPlan(
                f"stage {other} splits its operators over {degrees[other]} devices and stage 0 over {degrees[0]}: export={engine} "
                "has one degree for all. Fix: strategy.planner.tensor_parallel=false"
            )
        return Told(settings={NAMES[engine]: degrees[0]})

    def ways(self, engine: str, problem: Problem, strategy: Strategy) -> Iterator[EngineWay]:
        for split in splits(problem) if engine in NAMES else ():
            yield EngineWay(problem=split.view, strategy=strategy, expand=split.expand)


EXPORT = TensorParallelExport()
