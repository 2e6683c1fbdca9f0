"""What a run's plan is judged by: a bound on every plan, the best chain, one device, and the explanation of its time."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from gpp.analysis.comparison import Attempt, attempt, beside
from gpp.analysis.explain.explanation import Explanation, explain
from gpp.analysis.explain.what_if import WhatIf
from gpp.analysis.gains import Gains, Rival, predicted_gains, rivals
from gpp.cost.models.profiled import Profiled
from gpp.cost.problem import Problem
from gpp.errors import Infeasible
from gpp.graph.captured import Captured
from gpp.plan.plan import Plan
from gpp.planners.bounds.lower_bound import Bound, lower_bound
from gpp.planners.chains.data_parallel import DataParallel
from gpp.planners.chains.single import Single
from gpp.runtime.engine import Progress
from gpp.runtime.job import Job
from gpp.strategy import Strategy
from gpp.timeline import Timeline

if TYPE_CHECKING:
    from gpp.analysis.one_stage import OneStage
    from gpp.app.experiment import Experiment


def bound_of(experiment: Experiment, problem: Problem) -> Bound | None:
    """A time that no plan can beat; None where none fits, which the planner explains."""
    if experiment.mode == "max_batch":  # other batches have other bounds
        return None
    known = experiment.made.bound
    if known is None or known[0] is not problem:
        found = bound_under(experiment.strategy, problem, experiment.strategies, compares=experiment.mode == "compare")
        known = experiment.made.bound = problem, found
    return known[1]


def bound_under(strategy: Strategy, problem: Problem, others: Sequence[Strategy] = (), *, compares: bool = False) -> Bound | None:
    """A time that no plan can beat; None where none is known, or no plan fits.

    Args:
        others: strategies that plan, too.
        compares: whether each of them is asked by itself whether the bound is for its schedule.
    """
    if not _asks(strategy, problem) or unbounded(strategy, problem, compares=compares):
        return None
    with suppress(Infeasible):
        return lower_bound(problem, spares=any(one.memory.ways for one in (strategy, *others)))
    return None


def _asks(strategy: Strategy, problem: Problem) -> bool:
    """Whether a bound is asked for: that of `single` would be that of one device, not of all of them."""
    return problem.regime.trains and not isinstance(strategy.planner, Single)


def unbounded(strategy: Strategy, problem: Problem, *, compares: bool = False) -> str:
    """What no bound is known for, as a user calls it; empty where there is one, or nobody asks. `compares` as `bound_under` has it.

    A continuous pipeline or backwards in parts may be faster than the bound, which does not cover updates in parts, either, and
    is that of the mean amount where the work of samples differs.
    """
    if not _asks(strategy, problem):
        return ""
    kinds = ((problem.updates, "updates in parts"), (problem.varying, "samples of unequal work"))
    own = "" if compares else strategy.schedule.unbounded
    return own or next((kind for there, kind in kinds if there), "")


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
    known = tuple(WhatIf.of(f.strategy, "planned", f.plan, f.iteration_s, base_s) for f in baseline if f.plan is not None)
    return explain(
        plan,
        predicted,
        problem,
        experiment.strategy,
        bound=bound and (bound.of(plan) or bound),
        known=known,
        budget_s=experiment.explain_s,
        replan=experiment.plan is None and experiment.export is None,
    )


def one_stage_of(experiment: Experiment, problem: Problem, plan: Plan, predicted: Timeline) -> OneStage | None:
    """Why a plan for several devices is one stage; None where it is not, or where nothing else was to be had."""
    given = experiment.plan is not None or experiment.export is not None
    asked = given or _in_one_piece(experiment) or experiment.own_mode is not None or experiment.explain_s == 0
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
    from gpp.app.measuring import measured_gains  # a plan alone needs no rehearsals
    from gpp.runtime.rehearsal.rehearse import Rehearsals
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
