"""A plan for this machine: what it takes is timed in place, by the workers that will run it, before it is chosen.

plan by operators that were timed alone → rehearse → correct the operators → plan again, until the plan does not change.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from gpp.cost.models.profiled import Profile, Profiled, cpu_setting
from gpp.cost.problem import Problem
from gpp.plan.plan import Plan
from gpp.runtime.job import Job
from gpp.runtime.rehearsal.machine import MachineCosts, keep, known, machine_path, measure
from gpp.runtime.rehearsal.rehearse import Rehearsals, short, stage_times
from gpp.strategy import Strategy

SPAN_S = 1.0
"""Seconds that the steps of a rehearsal take together, as predicted."""

FEWEST, MOST = 8, 60
"""Steps of a rehearsal."""


def machine_costs(cost: Profiled, shared_memory: bool) -> MachineCosts | None:
    """The constants of this machine's processors, if they were measured."""
    return known(machine_path(cost.cache_dir, cpu_setting(cost.num_threads), shared_memory))


def on_this_machine(problem: Problem, costs: MachineCosts, profile: Profile) -> Problem:
    """The problem with the constants of this machine in place of a data sheet's."""
    return replace(problem, cluster=costs.cluster(problem.cluster), overheads=costs.overheads(profile.pass_s))


def settle(
    problem: Problem,
    plan: Plan,
    strategy: Strategy,
    *,
    given: bool,
    shared_memory: bool,
    job_of: Callable[[Problem, Plan], Job],
    weights: Callable[[], Mapping[str, Any]],
    environment: Mapping[str, str],
    say: Callable[[str], None],
) -> tuple[Problem, Plan]:
    """The problem by times in place, and the plan for it.

    Args:
        problem: its cost is a `Profiled` with a profile of its graph.
        plan: by operators timed alone.
        given: whether the plan is the user's own, which stays.
        job_of: the whole job of a plan.
        weights: initial weights; called once, if anything is rehearsed.
        environment: environment variables of workers.
        say: is told what is being timed.

    Raises:
        WorkerFailed: a rehearsal failed, as the run would.
    """
    cost = problem.cost
    assert isinstance(cost, Profiled)
    profile = cost.profile_of(problem.graph)
    assert profile is not None
    setting, on_cpu = cpu_setting(cost.num_threads), problem.cluster.devices[0].kind == "cpu"
    path = machine_path(cost.cache_dir, setting, shared_memory)
    unmeasured = on_cpu and known(path) is None
    if not unmeasured and _timed(profile, plan):
        return problem, plan
    with Rehearsals(environment) as rehearsals:
        if unmeasured:
            say("timing messages and actions on this machine ...")
            keep(path, costs := measure(rehearsals, setting, shared_memory=shared_memory))
            problem = on_this_machine(problem, costs, profile)
            plan = plan if given else strategy.plan(problem)
        initial, tried = None, []
        for number in range(cost.rehearsals):
            if _timed(profile, plan):
                break
            say(f"timing the plan's {len(plan.stages)} stages in place ...")
            initial = initial or weights()
            predicted_s = strategy.predict(plan, problem, record=False).metrics.iteration_s
            steps = max(FEWEST, min(MOST, math.ceil(SPAN_S / max(predicted_s, 1e-6))))
            job = short(job_of(problem, plan), steps)
            found = rehearsals.run(job, initial, predicted_s=predicted_s)
            profile = profile.timed(stage_times(job, found, profile.pass_s))
            cost = cost.add(profile)
            problem = replace(problem, cost=cost)
            tried.append(plan)
            if given or number + 1 == cost.rehearsals:
                break
            plan = strategy.plan(problem)
        if tried:
            cost.store(problem.graph, profile)
            if not _timed(profile, plan):
                plan = tried[-1]
            # A plan that was timed may be better than the one that followed from it.
            best = min([*tried, plan], key=lambda own: strategy.predict(own, problem, record=False).metrics.iteration_s)
            plan = plan if given else best
    return problem, plan


def _timed(profile: Profile, plan: Plan) -> bool:
    """Whether all stages of a plan have been timed in place."""
    return all(
        stage.tensor_parallel > 1
        or profile.knows(stage.ops, -(-stage.microbatch_size * stage.round_robin_degree // len(stage.devices)))
        for stage in plan.stages
    )
