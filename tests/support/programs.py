"""Programs for tests."""

from __future__ import annotations

from collections.abc import Sequence

from gpp.cost.stage import StageCost
from gpp.graph.op_graph import OpGraph
from gpp.plan.plan import Plan
from gpp.program import lower as whole
from gpp.program.program import Program
from gpp.schedules.base import AbstractSchedule
from gpp.schedules.flow import Work


def lower(
    plan: Plan,
    graph: OpGraph,
    schedule: AbstractSchedule,
    num_samples: int | None = None,
    *,
    minibatches: int = 1,
    global_norm: bool = False,
    bills: Sequence[StageCost] | None = None,
) -> Program:
    """The program of a schedule over `num_samples` samples (default: so many mini-batches), not checked.

    Args:
        bills: as `Work` has it; for stages that share devices a forward takes 1 and a backward 2 by default.
    """
    samples = plan.minibatch_size * minibatches if num_samples is None else num_samples
    work = Work(plan=plan, graph=graph, num_samples=samples, bills=bills or [bill_of(1.0, 2.0)] * len(plan.stages))
    return whole.lower(plan, graph, schedule.orders(work), samples, minibatches=minibatches, global_norm=global_norm)


def bill_of(forward_s: float, backward_s: float, weight_s: float = 0.0) -> StageCost:
    """Of a stage that takes no memory."""
    return StageCost(
        forward_s=forward_s,
        backward_s=backward_s,
        last_forward_s=forward_s,
        last_backward_s=backward_s,
        update_s=0.0,
        static_bytes=0.0,
        version_bytes=0.0,
        microbatch_bytes=0.0,
        transient_bytes=0.0,
        weight_s=weight_s,
        last_weight_s=weight_s,
    )
