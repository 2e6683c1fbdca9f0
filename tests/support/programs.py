"""Programs for tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gpp.graph.op_graph import OpGraph
from gpp.plan.plan import Plan
from gpp.program import lower as whole
from gpp.program.program import Program
from gpp.schedules.base import AbstractSchedule


def lower(
    plan: Plan,
    graph: OpGraph,
    schedule: AbstractSchedule,
    num_samples: int | None = None,
    *,
    minibatches: int = 1,
    global_norm: bool = False,
    seconds: Sequence[Mapping[str, float]] | None = None,
) -> Program:
    """The program of a schedule over `num_samples` samples (default: so many mini-batches), not checked.

    Args:
        seconds: as `AbstractSchedule.orders` has it; for stages that share devices a forward takes 1 and a backward 2 by default.
    """
    samples = plan.minibatch_size * minibatches if num_samples is None else num_samples
    orders = schedule.orders(plan, graph, samples, seconds or [{"F": 1.0, "B": 2.0}] * len(plan.stages))
    return whole.lower(plan, graph, orders, samples, minibatches=minibatches, global_norm=global_norm)
