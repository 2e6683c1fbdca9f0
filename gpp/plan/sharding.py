"""Stages whose operators are split over devices can be split so."""

from __future__ import annotations

from collections.abc import Sequence

from gpp.cost.problem import Problem
from gpp.errors import InvalidPlan
from gpp.graph.op_graph import mask_of
from gpp.stage import Stage


def check_sharding(stages: Sequence[Stage], problem: Problem) -> None:
    """Every operator of a tensor-parallel stage declares its degree, and shares no parameter with another stage.

    Raises:
        InvalidPlan: names the stage and the parameter.
    """
    for s, stage in enumerate(stages):
        if stage.tensor_parallel > 1:
            mask = mask_of(stage.ops)
            problem.trainable_bytes(stage.ops, stage.tensor_parallel)
            for name in sorted({name for op in stage.ops for name in problem.graph.ops[op].params}):
                if problem.graph.readers[name] & ~mask:
                    raise InvalidPlan(
                        f"stage {s} splits {name} over {stage.tensor_parallel} devices, but another stage reads it too"
                    )
