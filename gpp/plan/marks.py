"""Which of a stage's operators may be computed again, or kept on the host."""

from __future__ import annotations

from gpp.cost.problem import Problem
from gpp.errors import InvalidPlan
from gpp.stage import Stage
from gpp.weights.base import PipelinePosition


def check_marks(s: int, stage: Stage, *, backward: bool) -> None:
    """Prove that what is not kept is of the stage, in one way only, and that there is a backward that needs it.

    Args:
        s: the number of the stage.
        backward: whether the stage has backward passes.

    Raises:
        InvalidPlan: names the stage, the operators and the fix.
    """
    if foreign := sorted(set(stage.offload) - set(stage.ops)):
        raise InvalidPlan(f"stage {s} can keep its own operators on the host only, not {foreign[:8]}")
    if kept := sorted(set(stage.boundaries) - set(stage.recompute)):
        raise InvalidPlan(
            f"stage {s}: operators {kept[:8]} are in boundaries, which says that of what is computed again their outputs stay, "
            "but not in recompute. Fix: take them out of boundaries"
        )
    if both := sorted(set(stage.recompute) & set(stage.offload)):
        raise InvalidPlan(
            f"stage {s}: operators {both[:8]} are in recompute and in offload; each is kept in one way. Fix: take them out "
            "of one of the two"
        )
    if (stage.recompute or stage.offload) and not backward:
        raise InvalidPlan(
            f"stage {s} has no backward pass, so it keeps nothing: recompute={list(stage.recompute[:8])} and "
            f"offload={list(stage.offload[:8])} must be empty. Fix: leave them out"
        )


def check_repeated(s: int, stage: Stage, position: PipelinePosition, problem: Problem) -> None:
    """Prove that what is computed again gives what the forward did.

    Raises:
        InvalidPlan: names the stage and the operators.
    """
    if others := sorted(set(stage.recompute) - set(repeatable_ops(problem, stage.ops, position))):
        raise InvalidPlan(
            f"stage {s} computes operators {others[:8]} again for its backward, which under strategy.weights="
            f"{problem.regime.weights.name} uses other weights than the forward did. Fix: leave operators that read trained "
            "weights out of recompute, or use strategy/weights=stash"
        )


def repeatable_ops(problem: Problem, ops: tuple[int, ...], position: PipelinePosition) -> tuple[int, ...]:
    """Those of a stage's operators that may be computed again.

    Where a backward uses other weights than its forward did, those that read trained weights would give something else.
    """
    graph, weights = problem.graph, problem.regime.weights
    if weights.flushes or not weights.changes(position):
        return ops
    return tuple(op for op in ops if not graph.trained_by[op])
