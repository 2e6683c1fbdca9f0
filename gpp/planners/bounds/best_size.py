"""One micro-batch size after the other, where a search over all of them at once has missed the best."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from gpp.cost.problem import Problem
from gpp.errors import Infeasible
from gpp.plan.plan import Plan
from gpp.planners.bounds.lower_bound import lower_bound


def of_best_size(found: Plan, problem: Problem, plan: Callable[[Problem], Plan], step_s: Callable[[Plan, Problem], float]) -> Plan:
    """The plan, or a faster one with micro-batches of one size that the user could have imposed; the plan itself if one was.

    A planner cuts as if a loss on whole mini-batches were any operator, so what it compares sizes by is not the step that will run.
    A size is left out where even its bound is no shorter than the best plan.

    Args:
        found: the planner's own choice.
        plan: (problem with an imposed size) -> its plan; raises Infeasible.
        step_s: (plan, problem) -> predicted seconds of a step.
    """
    if problem.microbatch_size is not None:
        return found
    best, least_s = found, step_s(found, problem)
    for b in reversed(problem.microbatch_sizes()):
        asked = replace(problem, microbatch_size=b)
        with suppress(Infeasible):
            if lower_bound(asked, spares=True).iteration_s < least_s:
                other = plan(asked)
                if (seconds := step_s(other, problem)) < least_s:
                    best, least_s = other, seconds
    return best
