"""The distance of an order of passes from the best one for its plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from gpp.cost.problem import Problem
from gpp.errors import InvalidConfig
from gpp.plan.plan import Plan
from gpp.program.program import Task
from gpp.schedules.exact import bound_s
from gpp.strategy import Strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderGap:
    """The distance of a schedule from the best order of the same passes on the same devices, in the memory that the schedule
    keeps to.

    Args:
        passes: of a step.
        bound_s: no order has a shorter period.
        gap: (predicted - bound) / bound; not below 0 but by rounding, or the bound is wrong.
        searched: whether a solver looked for a better order; else the bound is one in closed form.
        closed: whether its search came to its end, so that the bound is the best order's period by the schedule's model.
    """

    passes: int
    bound_s: float
    gap: float
    searched: bool
    closed: bool


def order_gap(plan: Plan, problem: Problem, strategy: Strategy, iteration_s: float, limit: float) -> OrderGap | None:
    """The gap of a plan's order; None for a pipeline that does not drain.

    Steps of more than `MOST_TASKS` passes are not searched.

    Args:
        iteration_s: predicted.
        limit: deterministic seconds of search.
    """
    if not strategy.schedule.drains:
        return None
    samples = plan.minibatch_size
    orders: Mapping[int, Sequence[Task]] = strategy.orders(plan, problem, samples)
    work = replace(strategy.work(plan, problem, samples), bills=plan.bills(strategy.posed(problem)))
    flow = strategy.schedule.flow(work)
    least, searched, closed = bound_s(flow, "period"), False, False
    if limit > 0:
        from gpp.schedules.exact import MOST_TASKS, proven

        if len(flow.tasks) <= MOST_TASKS:
            with suppress(InvalidConfig):  # the solver is optional
                found = proven(flow, tuple(map(tuple, flow.by_lane(orders))), "period", limit)
                least, searched, closed = found.bound_s, True, found.closed
    gap = iteration_s / least - 1.0 if least > 0 else 0.0
    return OrderGap(passes=len(flow.tasks), bound_s=least, gap=gap, searched=searched, closed=closed)
