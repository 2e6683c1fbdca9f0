"""What a stage costs some of whose operators are computed again, or on the host meanwhile.

This is also where marks meet replicas of several devices: an operator that is split is computed again only as its profile declares
for its degree, so a split stage has no runs, and what its operators hold is what they declare.
"""

from __future__ import annotations

import numpy as np

from gpp.cost.amounts import Amounts
from gpp.cost.problem import Problem
from gpp.cost.stage import AbstractBill, split_amounts
from gpp.cost.variants import Repeats
from gpp.errors import InvalidPlan
from gpp.graph.op_graph import mask_of
from gpp.mechanisms.marks.runs import discarded, runs_of
from gpp.mechanisms.marks.stage import Marks
from gpp.stage import Stage
from gpp.weights.base import PipelinePosition


class MarksBill(AbstractBill):
    """Passes take the seconds of forwards that run again; held is what marks leave."""

    def check(self, problem: Problem, s: int, stage: Stage, value: Marks, position: PipelinePosition) -> None:
        """Prove that what is computed again gives what the forward did."""
        if others := sorted(set(value.recompute) - set(repeatable_ops(problem, stage.ops, position))):
            raise InvalidPlan(
                f"stage {s} computes operators {others[:8]} again for its backward, which under strategy.weights="
                f"{problem.regime.weights.name} uses other weights than the forward did. Fix: leave operators that read trained "
                "weights out of recompute, or use strategy/weights=stash"
            )

    def repeats(self, problem: Problem, stage: Stage, value: Marks) -> Repeats | None:
        if not value.recompute:
            return None
        alone = discarded(problem.graph, value.recompute, stage.devices_per_replica)
        again = runs_of(problem, stage.ops).again(alone, value.boundaries) if alone else ()
        return Repeats({*value.recompute} - {*alone}, again)

    def amounts(self, problem: Problem, stage: Stage, value: Marks) -> Amounts | None:
        alone = discarded(problem.graph, value.recompute, stage.devices_per_replica)
        declared = tuple(op for op in value.recompute if op not in alone)
        split, extra = split_amounts(problem, stage, declared)
        if not (alone or value.offload) or not mask_of(stage.ops) & problem.graph.differentiated:
            return split
        # What has left such a stage is not held: its backward knows where gradients enter, and needs no values there.
        runs = runs_of(problem, stage.ops, declared, stage.devices_per_replica)
        found = runs.discard(alone, stage.samples, value.boundaries)
        kept, moved = found.kept_and_moved([runs.tensors.at[op] for op in value.offload])
        return split._replace(kept=kept, once=found.once + extra, fixed=found.fixed, moved=moved)

    def first_backward(self, problem: Problem, stage: Stage, value: Marks, gradients: np.ndarray) -> float | None:
        if len(discarded(problem.graph, value.recompute, 1)) < len(value.recompute):
            return None
        return runs_of(problem, stage.ops).first_backward(gradients, value, stage.samples)


BILL = MarksBill()


def repeatable_ops(problem: Problem, ops: tuple[int, ...], position: PipelinePosition) -> tuple[int, ...]:
    """Those of a stage's operators that may be computed again.

    Where a backward uses other weights than its forward did, those that read trained weights would give something else.
    """
    graph, weights = problem.graph, problem.regime.weights
    if weights.flushes or not weights.changes(position):
        return ops
    return tuple(op for op in ops if not graph.trained_by[op])
