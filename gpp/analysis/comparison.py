"""Several strategies on one problem; each gives a plan with its prediction, or the reason why there is none."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

from gpp.cost.problem import Problem
from gpp.errors import GppError, Infeasible
from gpp.plan.plan import Plan
from gpp.planners.chains.sequential import Sequential
from gpp.schedules.one_f_one_b import OneFOneB
from gpp.strategy import Strategy
from gpp.timeline import Timeline

Status = Literal["ok", "infeasible", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """The result of one strategy for the problem.

    Args:
        error: why there is no plan.
        place: file and line at which the error came up; empty without one.
        search_s: seconds that the search took, with or without a plan.
        drains: whether its pipeline is empty between two mini-batches.
        unbounded: as `AbstractSchedule.unbounded`.
        ceiling: whether it only says how far others are from perfect.
    """

    strategy: str
    status: Status
    error: Exception | None = None
    place: str = ""
    plan: Plan | None = None
    predicted: Timeline | None = None
    search_s: float = 0.0
    drains: bool = True
    unbounded: str = ""
    ceiling: bool = False

    @property
    def reason(self) -> str | None:
        """Why there is no plan. To say why nothing fits takes some planners many searches, made when this is first read."""
        if self.error is None or isinstance(self.error, GppError):
            return self.error and str(self.error)
        return f"{type(self.error).__name__}: {self.error} (at {self.place}; mode=plan shows the traceback)"

    @property
    def iteration_s(self) -> float:
        """The predicted iteration time; infinite without a plan."""
        return self.predicted.metrics.iteration_s if self.predicted else float("inf")

    @property
    def sample_s(self) -> float:
        """The predicted time of a sample, by which attempts are ranked: their mini-batches may differ; infinite without a plan."""
        return self.iteration_s / self.plan.minibatch_size if self.plan else float("inf")


def attempt(strategy: Strategy, problem: Problem, *, record: bool = True, first: bool = False) -> Attempt:
    """Plan and simulate; any error becomes the reason.

    Args:
        record: whether to keep the predicted events.
        first: whether any plan that fits will do, as for `Strategy.plan`.
    """
    start = time.perf_counter()
    told = {"drains": strategy.schedule.drains, "unbounded": strategy.schedule.unbounded, "ceiling": strategy.ceiling}
    made = partial(Attempt, strategy=strategy.name, **told)
    try:
        plan = strategy.plan(problem, first=first)
        predicted = strategy.predict(plan, problem, record=record)
    except Exception as error:
        # A bug of one planner must not lose the others' results.
        status: Status = "infeasible" if isinstance(error, Infeasible) else "failed"
        took = time.perf_counter() - start
        last = traceback.extract_tb(error.__traceback__)[-1]
        # The frames of a traceback would keep all that the search had found.
        return made(status=status, error=error.with_traceback(None), place=f"{last.filename}:{last.lineno}", search_s=took)
    return made(status="ok", plan=plan, predicted=predicted, search_s=plan.search_s)


def compare(
    strategies: Sequence[Strategy], problem: Problem, starting: Callable[[str], None] = lambda name: None
) -> tuple[Attempt, ...]:
    """An attempt for each strategy, in their order.

    Args:
        starting: called with the name of each strategy before it plans.
    """
    out = []
    for strategy in strategies:
        starting(strategy.name)
        out.append(attempt(strategy, problem))
    return tuple(out)


class BestAttempts(NamedTuple):
    """The attempts with the shortest predicted time of a sample of each kind; None where no strategy of the kind has a plan.

    The kinds are two tasks: a pipeline that drains before every update trains as one device would, one that does not trains on
    weights that are late, or foreseen. So a time of one says nothing against a time of the other.
    """

    synchronous: Attempt | None
    asynchronous: Attempt | None

    @property
    def own(self) -> Attempt | None:
        """The one that stands for the comparison: the synchronous one where there is one."""
        return self.synchronous or self.asynchronous

    def of_kind(self, attempt: Attempt) -> Attempt | None:
        """The best of an attempt's own kind."""
        return self.synchronous if attempt.drains else self.asynchronous


def best_of(attempts: Sequence[Attempt]) -> BestAttempts:
    """The best attempt of each kind, the first among equals; ceilings are none."""

    def least(drains: bool) -> Attempt | None:
        found = (a for a in attempts if a.status == "ok" and a.drains == drains and not a.ceiling)
        return min(found, key=lambda a: a.sample_s, default=None)

    return BestAttempts(least(True), least(False))


def chain_beside(strategy: Strategy) -> Strategy | None:
    """The strategy that finds the best chain, as a baseline of another; None for `sequential` itself.

    It has the other's own freedom: a chain with replicas beside a graph without them would differ twice, and one that keeps
    everything might not fit where the other's operators are computed again.
    """
    if isinstance(strategy.planner, Sequential) and isinstance(strategy.schedule, OneFOneB):
        return None
    planner = Sequential(replication=getattr(strategy.planner, "replication", True))
    free = {"memory": strategy.sparing, "objective": strategy.objective, "edges": strategy.edges}
    return Strategy(name="sequential", planner=planner, schedule=OneFOneB(), **free)


def beside(strategy: Strategy, problem: Problem) -> tuple[Attempt, ...]:
    """The baseline of a strategy: `sequential`'s attempt; empty for `sequential` itself."""
    chain = chain_beside(strategy)
    if chain is None:
        return ()
    # Where nothing is trained, the metrics that planners ask for are the objective's alone.
    return (attempt(chain, problem, record=not problem.regime.trains),)
