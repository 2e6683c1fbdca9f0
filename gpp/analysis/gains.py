"""The gain of a plan: its time beside that of the best chain of stages, and of one device."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import final

from gpp.analysis.comparison import Attempt, attempt, chain_beside
from gpp.cost.problem import Problem
from gpp.errors import Infeasible
from gpp.plan.plan import Plan
from gpp.planners.chains.single import Single
from gpp.schedules.one_f_one_b import OneFOneB
from gpp.strategy import Strategy
from gpp.timeline import Metrics

CHAIN, ONE_DEVICE = "the best chain", "one device"
ROUNDING = 1e-9
"""Share by which equal predictions may differ: other plans add the same seconds up in another order."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Rival:
    """A simpler way to run the same model.

    Args:
        name: `the best chain` or `one device`.
        plan: None where there is none.
        predicted_s: seconds of a step, as predicted; infinite without a plan.
        reason: why there is no plan.
        same: whether the plan is the run's own.
    """

    name: str
    strategy: Strategy
    plan: Plan | None
    predicted_s: float
    reason: str | None = None
    same: bool = False


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """The plan's time beside a rival's.

    Args:
        own_s, rival_s: seconds of a step (of a mini-batch, where nothing is trained); None where the rival has no plan.
        low, high: the least and the largest factor of the rounds of a measurement; equal where nothing was measured.
        reason: why the rival has no plan.
        same: whether the rival's plan is the run's own.
        foreseen: the rival's predicted seconds over the plan's; None where the rival has no plan.
    """

    over: str
    own_s: float
    rival_s: float | None
    low: float | None = None
    high: float | None = None
    reason: str | None = None
    same: bool = False
    foreseen: float | None = None

    @property
    def speedup(self) -> float | None:
        """The rival's seconds over the plan's; None where the rival has no plan."""
        return None if self.rival_s is None or not self.own_s > 0 else self.rival_s / self.own_s

    @property
    def surely_faster(self) -> bool:
        """Whether every round was faster than the rival."""
        return self.low is not None and self.low > 1.0 + ROUNDING

    @property
    def surely_slower(self) -> bool:
        """Whether every round was slower than the rival."""
        return self.high is not None and self.high < 1.0 - ROUNDING


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Gains:
    """All that a run gains.

    Args:
        one: what takes the seconds: a step, or a request.
        measured: whether the plans were run in turns on this machine; else their times are predicted.
        rounds, steps: turns of each plan, and the steps of a turn that count; 0 where nothing was measured.
        taken: the share of one device's step in which others had its core; None where nobody has measured it.
        workers, cores: workers of the plan, and cores of this machine that they share; 0 where they are not processes of it.
        waits: the share of the step in which the plan's devices compute nothing, as predicted.
        work: seconds that the plan's devices compute in all, over those of one device, as predicted; None without a rival on one.
        pieces: samples of the plan's smallest micro-batch, and of one device's; None without a rival on one.
    """

    gains: tuple[Gain, ...]
    one: str = "step"
    measured: bool = False
    rounds: int = 0
    steps: int = 0
    taken: float | None = None
    workers: int = 0
    cores: int = 0
    waits: float = 0.0
    work: float | None = None
    pieces: tuple[int, int] | None = None


def judged_s(metrics: Metrics) -> float:
    """Seconds by which plans are told apart: of a step, or the latency of a mini-batch, where these arrive at a rate."""
    latency_s = metrics.course and metrics.course.latency_s
    return metrics.iteration_s if latency_s is None else latency_s


def rivals(strategy: Strategy, problem: Problem, plan: Plan, chain: Sequence[Attempt], *, uncut: bool) -> tuple[Rival, ...]:
    """The simpler kinds of plans that a plan is compared with, without its own kind.

    Args:
        chain: the attempt of the best chain, where it has been made.
        uncut: whether one device may see the mini-batch in one piece, whatever micro-batches the pipeline has.
    """
    out = list[Rival]()
    if (beside := chain_beside(strategy)) is not None and chain:
        out.append(_rival(CHAIN, beside, chain[0], plan))
    if not isinstance(strategy.planner, Single):
        alone = Strategy(
            name="single", planner=Single(), schedule=OneFOneB(), memory=strategy.sparing, objective=strategy.objective
        )
        out.append(_rival(ONE_DEVICE, alone, _on_one_device(alone, problem, uncut=uncut), plan))
    return tuple(out)


def _on_one_device(alone: Strategy, problem: Problem, *, uncut: bool) -> Attempt:
    """The attempt of one device; `uncut` as `rivals` has it."""
    whole = replace(problem, microbatch_size=None)
    # One device needs no micro-batches: it would be slowed down for nothing.
    posed = [problem, whole] if uncut and problem.microbatch_size else [problem]
    found = min((attempt(alone, one) for one in posed), key=_judged)
    if not uncut or not isinstance(found.error, Infeasible):
        return found
    # Unless they are what makes the model fit: then the largest that does.
    smaller = (replace(problem, microbatch_size=b) for b in reversed(whole.microbatch_sizes()[:-1]))
    return next((other for one in smaller if (other := attempt(alone, one)).plan is not None), found)


def _judged(found: Attempt) -> float:
    return judged_s(found.predicted.metrics) if found.predicted else float("inf")


def _rival(name: str, strategy: Strategy, found: Attempt, plan: Plan) -> Rival:
    same = found.plan is not None and found.plan.stages == plan.stages
    reason = found.error.short if isinstance(found.error, Infeasible) else found.reason
    return Rival(name=name, strategy=strategy, plan=found.plan, predicted_s=_judged(found), reason=reason, same=same)


def predicted_gains(found: Sequence[Rival], plan: Plan, predicted: Metrics) -> Gains:
    """The gains of a plan as predicted."""
    own_s, gains = judged_s(predicted), list[Gain]()
    for rival in found:
        seconds = None if rival.plan is None else rival.predicted_s
        factor = None if seconds is None or not own_s > 0 else seconds / own_s
        known = {"over": rival.name, "own_s": own_s, "rival_s": seconds, "low": factor, "high": factor, "foreseen": factor}
        gains.append(Gain(**known, reason=rival.reason, same=rival.same))
    alone = next((rival for rival in found if rival.name == ONE_DEVICE and rival.plan is not None), None)
    if alone is None or alone.plan is None:
        return Gains(gains=tuple(gains), one=predicted.one, waits=predicted.bubble_fraction)
    computes_s = (1 - predicted.bubble_fraction) * predicted.iteration_s * plan.num_devices
    pieces = min(stage.microbatch_size for stage in plan.stages), alone.plan.stages[0].microbatch_size
    work = computes_s / alone.predicted_s
    return Gains(gains=tuple(gains), one=predicted.one, waits=predicted.bubble_fraction, work=work, pieces=pieces)


def gain_of_rounds(rival: Rival, own_s: Sequence[float], rival_s: Sequence[float]) -> Gain:
    """The gain over a rival whose rounds took turns with the plan's, so that both saw the same neighbours.

    Args:
        own_s, rival_s: seconds of a step in each round.
    """
    factors = [theirs / ours for ours, theirs in zip(own_s, rival_s, strict=True)]
    middle = statistics.median(own_s)
    # The ratio is the median of the rounds' own ratios; the rival's seconds follow from it, so that the words agree.
    seconds = middle * statistics.median(factors)
    return Gain(over=rival.name, own_s=middle, rival_s=seconds, low=min(factors), high=max(factors))
