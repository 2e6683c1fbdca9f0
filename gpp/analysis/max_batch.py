"""The largest micro-batch of a strategy: doubling until two sizes in a row are refused, then bisection.

What varies is the micro-batch. The number of micro-batches of a mini-batch stays, so the mini-batch grows with it; a strategy
whose pipeline does not drain has as many as its weights ask for, one for most, so there it is the mini-batch that is searched.
Whatever the planner chooses otherwise it chooses anew for every size: cuts, replicas, placement. Sizes are tried with what says
soonest whether the strategy has a plan (`AbstractPlanner.fitting`), and a search ends with the first plan that fits; the plan of
the largest one is the strategy's own.

Sizes have six binary digits at most (1 to 64, then every second number, then every fourth, ...): the boundary is found to 3 %, and
replicas, which divide micro-batches, find sizes that they divide. Two refusals, because one may be a gap: a size that the
replicas of a plan cannot share evenly needs more memory than the next one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from gpp.analysis.comparison import Attempt, attempt
from gpp.cost.problem import Problem
from gpp.errors import Infeasible
from gpp.strategy import Strategy

DIGITS = 6
LARGEST = 10**9
"""Samples of a mini-batch that is not tried any more: no setting takes more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LargestMicrobatch:
    """The largest micro-batch of a strategy.

    Args:
        best: the plan at the largest micro-batch that fits, and its prediction; without a plan where none fits.
        microbatch_size: that micro-batch; 0 where none fits.
        microbatches: of a mini-batch.
        beyond: the next size, which is refused; None where no size was.
        reason: why it is refused, without what would help: a smaller micro-batch is what was looked for.
        tried: (micro-batch, whether it fits), in the order in which they were tried.
        confirmed: what real workers said: how the boundary ended, and how the next size did; None where none ran.
    """

    best: Attempt
    microbatch_size: int
    microbatches: int
    beyond: int | None
    reason: str | None
    tried: tuple[tuple[int, bool], ...]
    confirmed: Confirmed | None = None

    @property
    def strategy(self) -> str:
        return self.best.strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class Confirmed:
    """The ends of real runs under an enforced limit.

    Args:
        at: of the boundary's plan: `ok`, or the reason of its end.
        size: a larger micro-batch.
        beyond: of the same stages with this one: the reason of its end, or `ok`.
        peak_share: the allocator's peak at the boundary over the memory of the fullest device; None where it did not end well.
    """

    at: str
    size: int
    beyond: str
    peak_share: float | None

    @property
    def holds(self) -> bool:
        """Whether the boundary is where the prediction puts it."""
        return self.at == "ok" and self.beyond != "ok"


def microbatches_of(strategy: Strategy, problem: Problem) -> int:
    """Micro-batches of a mini-batch: as the problem has them, or as many as devices where it leaves them open."""
    if not strategy.schedule.drains:
        return max(strategy.weights.least_accumulation(problem.cluster.num_devices), strategy.weights.accumulation or 1)
    if problem.microbatch_size is None:
        return problem.cluster.num_devices
    return problem.minibatch_size // problem.microbatch_size


def at_size(problem: Problem, microbatch_size: int, microbatches: int) -> Problem:
    """The problem with another micro-batch."""
    return replace(problem, minibatch_size=microbatch_size * microbatches, microbatch_size=microbatch_size)


def largest(
    strategy: Strategy, problem: Problem, trying: Callable[[str, int], None] = lambda name, size: None
) -> LargestMicrobatch:
    """The largest micro-batch for which the strategy has a plan.

    Args:
        problem: its sizes give the number of micro-batches and nothing else.
        trying: called with the strategy's name and each micro-batch before it plans.
    """
    count, fitting = microbatches_of(strategy, problem), replace(strategy, planner=strategy.planner.fitting)
    found: dict[int, Attempt] = {}

    def fits(size: int) -> bool:
        trying(strategy.name, size)
        found[size] = attempt(fitting, at_size(problem, size, count), record=False, first=True)
        return found[size].status == "ok"

    low, high, size, refusals = 0, None, 1, 0
    while refusals < 2 and size * count <= LARGEST:
        if fits(size):
            low, high, refusals = size, None, 0
        else:
            high, refusals = high or size, refusals + 1
        size *= 2
    while high is not None and low and high - low > (step := step_at(low)):
        middle = low + (high - low) // (2 * step) * step
        low, high = (middle, high) if fits(middle) else (low, middle)
    best = attempt(strategy, at_size(problem, low or 1, count))
    refused = found[high] if high else None
    lacks = refused.error.constraint if refused and isinstance(refused.error, Infeasible) else None
    return LargestMicrobatch(
        best=best,
        microbatch_size=low,
        microbatches=count,
        beyond=high,
        reason=lacks or (refused and refused.reason),
        tried=tuple((size, each.status == "ok") for size, each in found.items()),
    )


def step_at(size: int) -> int:
    """The distance of the sizes that are tried around a size."""
    return 1 << max(size.bit_length() - DIGITS, 0)
