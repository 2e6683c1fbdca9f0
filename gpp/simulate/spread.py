"""The spread of the steps where the work differs from sample to sample (`gpp.cost.uneven`), and plans judged by it.

Mini-batches follow each other as in a run: each pass takes what the samples of its own micro-batch make it take, and each device
begins a step when it has ended the last one. The order of the actions stays that of the program.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise

import numpy as np

from gpp.cost.problem import Problem
from gpp.cost.uneven import Varying
from gpp.errors import Infeasible
from gpp.plan.plan import Plan
from gpp.program.kinds import COMPUTE, pass_seconds
from gpp.program.program import Program
from gpp.simulate.crowded import shared_times
from gpp.simulate.longest_path import LongestPath
from gpp.simulate.simulator import Costs
from gpp.timeline import StepSpread, Timeline

GRID = np.linspace(0.0, 1.0, 17)
"""Amounts at which passes are priced; between them they are linear, as operators' times are between measured ones."""


def part_bounds(plan: Plan, varying: Varying, num_samples: int) -> tuple[int, ...]:
    """Where the parts of a mini-batch begin and end that should be even: what a replica of a stage whose work varies has at a time.

    >>> part_bounds(plan, Varying(shares=(1.0,) * 4, amount=0.5), 2)
    (0, 1, 2)
    """
    varies = [stage for stage in plan.stages if any(varying.shares[op] for op in stage.ops)]
    return tuple(sorted({0, num_samples, *(piece.lo for stage in varies for piece in stage.pieces(num_samples))}))


def step_seconds(program: Program, plan: Plan, problem: Problem) -> list[float]:
    """Seconds of a step on each of the problem's mini-batches, one after the other; none for a pipeline that does not drain."""
    varying = problem.varying
    if varying is None or program.minibatches > 1:
        return []
    waits, costs = program.waits, Costs.of(program, plan, problem)
    seconds, priced = np.array(costs.seconds), _VaryingPasses(program, plan, problem)
    bounds, cluster = part_bounds(plan, varying, program.num_samples), problem.cluster
    crowded = cluster.processors if cluster.crowded(plan.num_devices) else None
    out, start, ended = list[float](), None, 0.0
    for amounts in varying.batches:
        if len(amounts) != program.num_samples:
            continue
        own = priced.seconds(seconds, varying.order(amounts, bounds)).tolist()
        if crowded:
            out.append(shared_times(waits, own, costs.late, crowded)[1])
            continue
        times = LongestPath.of(waits, own, costs.late).times(start)
        start, end = times.free_s, max(times.free_s[: len(waits.devices)])
        out.append(end - ended)
        ended = end
    return out


class _VaryingPasses:
    """The passes of a program whose work varies: their labels, the samples of each, and its seconds on `GRID` over the mean's."""

    def __init__(self, program: Program, plan: Plan, problem: Problem) -> None:
        varying, n = problem.varying, program.num_samples
        assert varying is not None
        bills = [plan.bills(replace(problem, varying=varying.at(float(a)))) for a in GRID]
        mean = plan.bills(problem)
        pieces = {
            (s, piece.device, piece.microbatch): (piece.lo, piece.hi)
            for s, stage in enumerate(plan.stages)
            if any(varying.shares[op] for op in stage.ops)
            for piece in stage.pieces(n)
        }
        self._rows = list[tuple[int, int, int]]()
        rates = list[list[float]]()
        for label, (device, action) in enumerate(program.waits.labels):
            s, kind = action.stage, action.kind
            if kind not in COMPUTE or device not in plan.stages[s].devices:
                continue
            piece = pieces.get((s, plan.stages[s].replica_of(device)[0], action.microbatch))
            last = (action.microbatch + 1) * plan.stages[s].microbatch_size > n
            base = pass_seconds(mean[s], last=last)[kind]
            if piece is not None and base:
                self._rows.append((label, *piece))
                rates.append([pass_seconds(bill[s], last=last)[kind] / base for bill in bills])
        self._rates = np.array(rates)

    def seconds(self, mean_s: np.ndarray, amounts: np.ndarray) -> np.ndarray:
        """[labels] seconds of the program's actions, given those at the mean amount, and the amounts in the order of the passes."""
        out, until = mean_s.copy(), np.concatenate([[0.0], np.cumsum(amounts)])
        for rates, (label, lo, hi) in zip(self._rates, self._rows, strict=True):
            out[label] *= np.interp((until[hi] - until[lo]) / (hi - lo), GRID, rates)
        return out


def with_spread(found: Timeline, program: Program, plan: Plan, problem: Problem) -> Timeline:
    """A timeline at the mean amount with the spread of the steps, whose median is the step's time; as it is where there is none."""
    varying, seconds = problem.varying, step_seconds(program, plan, problem)
    if varying is None or not seconds:
        return found
    metrics, spread = found.metrics, StepSpread.of(seconds, varying.quantile)
    rate = metrics.throughput_samples_per_s * metrics.iteration_s / spread.median_s
    return replace(found, metrics=replace(metrics, iteration_s=spread.median_s, throughput_samples_per_s=rate, spread=spread))


def judged_by_tail(problem: Problem, plan_of: Callable[[Problem], Plan], predict: Callable[[Plan, Problem], Timeline]) -> Plan:
    """The plan whose steps are shortest at the problem's quantile, of those for the mean amount, for that of micro-batches in the
    tail, and for micro-batches of twice and half as many samples.

    Args:
        plan_of: plans for one amount.

    Raises:
        Infeasible: no plan fits.
    """
    varying = problem.varying
    assert varying is not None
    mean = replace(problem, varying=replace(varying, judged=True))
    found = [first := plan_of(mean)]
    if problem.cluster.num_devices == 1:
        return first
    bounds = part_bounds(first, varying, problem.minibatch_size)
    ordered = [varying.order(amounts, bounds) for amounts in varying.batches if len(amounts) == problem.minibatch_size]
    means = [float(row[lo:hi].mean()) for row in ordered for lo, hi in pairwise(bounds)]
    tries = [(float(np.quantile(means, varying.quantile)), problem.microbatch_size)] if means else []
    if problem.microbatch_size is None:
        b = max(stage.microbatch_size for stage in first.stages)
        tries += [(varying.amount, size) for size in (b // 2, b * 2) if size in problem.microbatch_sizes()]
    for amount, size in tries:
        with suppress(Infeasible):
            found.append(plan_of(replace(mean, varying=replace(varying.at(amount), judged=True), microbatch_size=size)))

    def tail_s(plan: Plan) -> float:
        metrics = predict(plan, problem).metrics
        return metrics.spread.tail_s if metrics.spread else metrics.iteration_s

    best, count = min(found, key=tail_s), len({plan.stages for plan in found})
    words = f"by the time in which {varying.quantile:.0%} of the steps on {len(varying.batches)} mini-batches end, of {count} plans"
    return replace(best, explanation=(*best.explanation, f"chosen {words}"))
