"""What a run's plan is judged by: a bound on every plan, the best chain, one device, and the explanation of its time."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from gpp.analysis.comparison import Attempt, attempt, beside
from gpp.analysis.explain.explanation import Explanation, explain
from gpp.analysis.explain.what_if import planned
from gpp.analysis.gains import ONE_DEVICE, Gains, Rival, gain_of_rounds, predicted_gains, rivals
from gpp.cost.models.profiled import Profiled
from gpp.cost.problem import Problem
from gpp.errors import GppError, Infeasible, WorkerFailed
from gpp.graph.captured import Captured
from gpp.plan.plan import Plan
from gpp.planners.bounds.lower_bound import Bound, lower_bound
from gpp.planners.chains.data_parallel import DataParallel
from gpp.planners.chains.single import Single
from gpp.runtime.engine import Progress
from gpp.runtime.job import Job
from gpp.runtime.rehearsal.rehearse import UNTIMED, Rehearsals, short
from gpp.timeline import Metrics, Timeline

if TYPE_CHECKING:
    from gpp.analysis.one_stage import OneStage
    from gpp.app.experiment import Experiment


def bound_of(experiment: Experiment, problem: Problem) -> Bound | None:
    """A time that no plan can beat; None where none fits, which the planner explains."""
    strategy = experiment.strategy
    bounded = strategy.schedule.bounded or experiment.mode == "compare"
    one_piece = isinstance(strategy.planner, Single)
    other = experiment.mode == "max_batch" or not problem.regime.trains
    if other or one_piece or problem.minibatch_ops or problem.updates or not bounded:
        # The bound of `single` would be that of one device, not of all of them; the bound does not cover operators
        # with a micro-batch of their own, nor updates in parts; a continuous pipeline or backwards in parts may be faster; other
        # batches have other bounds.
        return None
    known = experiment.made.bound
    if known is None or known[0] is not problem:
        found = None
        with suppress(Infeasible):
            found = lower_bound(problem, spares=any(one.memory.ways for one in (strategy, *experiment.strategies)))
        known = experiment.made.bound = problem, found
    return known[1]


def _in_one_piece(experiment: Experiment) -> bool:
    """Whether the strategy leaves the model in one piece."""
    return isinstance(experiment.strategy.planner, Single | DataParallel)


def plans_again(experiment: Experiment) -> bool:
    """Whether anything but the run's own plan may be searched for."""
    return experiment.mode != "plan" or experiment.explain_s > 0


def baseline_of(experiment: Experiment, problem: Problem) -> tuple[Attempt, ...]:
    """The prediction of `sequential` for the same problem, to be shown beside the plan's."""
    if not plans_again(experiment) or isinstance(experiment.strategy.planner, Single):
        return ()
    found = beside(experiment.strategy, problem)
    # A layout by hand is compared with the best plan that is found for its problem, too.
    return found if experiment.layout is None else (*found, attempt(experiment.strategy, problem, record=False))


def explanation_of(
    experiment: Experiment, problem: Problem, plan: Plan, predicted: Timeline, bound: Bound | None, baseline: tuple[Attempt, ...]
) -> Explanation | None:
    """The explanation of the plan's time; None where the engine leaves nothing to plan, and for a plan without a program."""
    if _in_one_piece(experiment) or plan.periodic:
        return None
    base_s = predicted.metrics.iteration_s
    known = tuple(planned(f.strategy, f.plan, f.iteration_s, base_s) for f in baseline if f.plan is not None)
    return explain(
        plan,
        predicted,
        problem,
        experiment.strategy,
        bound=bound and (bound.of(plan) or bound),
        known=known,
        budget_s=experiment.explain_s,
        replan=experiment.plan is None,
    )


def one_stage_of(experiment: Experiment, problem: Problem, plan: Plan, predicted: Timeline) -> OneStage | None:
    """Why a plan for several devices is one stage; None where it is not, or where nothing else was to be had."""
    asked = _in_one_piece(experiment) or experiment.plan is not None or experiment.own_mode is not None or experiment.explain_s == 0
    if asked or len(plan.stages) > 1:
        return None
    from gpp.analysis.one_stage import one_stage

    return one_stage(experiment.strategy, problem, plan, predicted.metrics)


def rivals_of(
    experiment: Experiment, captured: Captured, problem: Problem, plan: Plan, chain: tuple[Attempt, ...]
) -> tuple[Rival, ...]:
    """The simpler ways to run the model; none where nothing may be planned again."""
    if not plans_again(experiment):
        return ()
    uncut = captured.batch is None and not problem.minibatch_ops and experiment.own_mode is None
    return rivals(experiment.strategy, problem, plan, chain, uncut=uncut)


def gains_of(
    experiment: Experiment, problem: Problem, job: Job, predicted: Timeline, found: tuple[Rival, ...], progress: Progress
) -> Gains:
    """What a run has gained over its rivals: measured where its workers are this machine's and `baselines_s` allows it."""
    cost = problem.cost
    measures = experiment.baselines_s and experiment.trains and experiment.engine.rehearses
    if not (measures and isinstance(cost, Profiled) and cost.rehearsals > 0):
        return predicted_gains(found, job.plan, predicted.metrics)
    from gpp.runtime.worker.parent import worker_environment

    def job_of(rival: Rival) -> Job:
        assert rival.plan is not None
        run = replace(experiment, strategy=rival.strategy, resume=None)
        return run.job(job.captured, problem, rival.plan)

    return measured_gains(
        found,
        job,
        predicted.metrics,
        job_of,
        lambda: experiment.weights(job.captured),
        rehearsals=experiment.made.rehearsals or Rehearsals(worker_environment(cost.num_threads)),
        budget_s=experiment.baselines_s,
        progress=progress,
    )


ROUNDS, FEWEST_ROUNDS = 3, 2
"""Turns of each plan, and those of plans whose steps are long; with one nobody would see whether a difference is one."""

TURN_S = 0.8
"""Seconds that the steps of a turn take together, as predicted."""

FEWEST, MOST = UNTIMED + 3, 60
"""Steps of a turn. Long steps may be fewer, down to one that counts."""


def turns_within(budget_s: float, step_s: float) -> tuple[int, int] | None:
    """(turns, fewest steps of a turn) that fit into a budget: rather short turns than few; None where not even two do.

    Args:
        step_s: seconds of one step of every plan together.

    >>> turns_within(15.0, 0.5), turns_within(15.0, 1.6), turns_within(15.0, 2.0), turns_within(15.0, 3.0)
    ((3, 5), (3, 3), (2, 3), None)
    """
    choices = ((turns, steps) for turns in (ROUNDS, FEWEST_ROUNDS) for steps in range(FEWEST, UNTIMED, -1))
    return next(((turns, steps) for turns, steps in choices if turns * steps * step_s <= budget_s), None)


def measured_gains(
    rivals: tuple[Rival, ...],
    own: Job,
    predicted: Metrics,
    job_of: Callable[[Rival], Job],
    weights: Callable[[], Mapping[str, Any]],
    *,
    rehearsals: Rehearsals,
    budget_s: float,
    progress: Progress,
) -> Gains:
    """The gains of a run's plan: measured in as many turns as `budget_s` allows, or predicted where it allows less than two.

    Args:
        own: the job that has run.
        job_of: the job of a rival, over the same model, data and settings.
        weights: initial weights by full name.
        rehearsals: closed afterwards; they may have been started before.
        progress: is told what is being measured, and why nothing was.
    """
    foreseen = predicted_gains(rivals, own.plan, predicted)
    others = [rival for rival in rivals if rival.plan is not None and not rival.same]
    step_s = {None: predicted.iteration_s, **{rival.name: rival.predicted_s for rival in others}}
    if not others:
        return foreseen
    all_s = sum(step_s.values())
    if (within := turns_within(budget_s, all_s)) is None:
        least_s = FEWEST_ROUNDS * (UNTIMED + 1) * all_s
        progress.warn(
            f"what was gained is predicted: {FEWEST_ROUNDS} turns of {UNTIMED + 1} steps of each plan take {least_s:.0f} s, and "
            f"baselines_s is {budget_s:g}; baselines_s={math.ceil(least_s)} measures it"
        )
        return foreseen
    turns, fewest = within
    steps = {name: min(MOST, max(fewest, math.ceil(TURN_S / max(seconds, 1e-6)))) for name, seconds in step_s.items()}
    found: dict[str | None, list[float]] = {name: [] for name in step_s}
    taken = list[float]()
    try:
        jobs = {None: own, **{rival.name: job_of(rival) for rival in others}}
        jobs = {name: short(job, steps[name]) for name, job in jobs.items()}
        initial = weights()
        with rehearsals:
            begin, turn = time.perf_counter(), 0
            # Steps may take longer than predicted: then there are fewer turns.
            while turn < FEWEST_ROUNDS or (turn < turns and (time.perf_counter() - begin) * (turn + 1) <= turn * budget_s):
                turn += 1
                progress.say(f"measuring the best chain and one device, turn {turn} of {turns} ...")
                for name, job in jobs.items():
                    devices = rehearsals.run(job, initial, predicted_s=step_s[name])
                    found[name].append(max(device.step_s for device in devices))
                    if name == ONE_DEVICE:
                        taken.append(devices[0].waited_s / devices[0].step_s)
    except (WorkerFailed, GppError) as error:
        progress.warn(f"what was gained is predicted, because it could not be measured: {error}")
        return foreseen
    own_s, by_name = found.pop(None), {rival.name: rival for rival in others}
    measured = {name: gain_of_rounds(by_name[str(name)], own_s, seconds) for name, seconds in found.items()}
    return replace(
        foreseen,
        gains=tuple(replace(measured.get(gain.over, gain), foreseen=gain.foreseen) for gain in foreseen.gains),
        measured=True,
        rounds=len(own_s),
        steps=min(job.settings.steps for job in jobs.values()) - UNTIMED,
        taken=statistics.median(taken) if taken else None,
        workers=len(own.program.actions),
        cores=len(os.sched_getaffinity(0)) if own.settings.device_kind == "cpu" else 0,
    )
