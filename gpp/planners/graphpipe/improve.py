"""Two improvements of a finished plan that change many stages at once.

`recut` runs the planner's own dynamic program over the line of the plan's operators, cut finely around the boundaries. `spread`
deals idle devices out, one stage at a time, as long as bounds fall.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np

from gpp.cost.stage import stage_bytes
from gpp.plan.plan import Plan
from gpp.planners.common.candidates import Candidate, Part, Parts
from gpp.planners.common.incumbent import Incumbent
from gpp.planners.common.interval_program import LONGEST_LINE, POWER
from gpp.planners.common.moves import halves
from gpp.planners.common.stage_costs import StageCosts
from gpp.planners.graphpipe.partition_search import Lanes, PartitionSearch
from gpp.planners.graphpipe.sp_structure import SPStructure

MOST_PLACES, MOST_IF_TIGHT = 100, 256
"""Places to cut in `recut`; more where memory decides, which asks for stages that fit exactly."""

TIGHT = 0.9
"""Share of the memory at which a stage counts as decided by it."""

FINER, NUM_FINER = (0.8, 1.05), 26
"""Limits of `recut` in units of the slowest stage's time, and how many of them."""


MANY_STAGES, SLOWEST, FEW_STEPS = 100, 8, 8
"""Stages of a plan from which on `spread` looks at the slowest ones only, how many these are, and steps that it takes then: a step
judges a whole plan for each stage that it looks at."""


def recut(incumbent: Incumbent, plan: Plan) -> None:
    """Simulate the best of the dynamic program over the plan's own line of operators, cut finely around its boundaries.

    Stages and replicas may change here, which `all_boundaries` does not do.
    """
    costs, problem = incumbent.assessor.costs, incumbent.assessor.problem
    line = tuple(op for stage in plan.stages for op in stage.ops)
    if len(plan.stages) < 2 or len(line) > LONGEST_LINE:
        return
    b = plan.stages[0].microbatch_size
    fullest = max(stage_bytes(problem, stage).peak(stage.ahead) for stage in plan.stages)
    most = MOST_IF_TIGHT if fullest > TIGHT * costs.limit_bytes else MOST_PLACES
    near = max(1, most // (2 * len(plan.stages)))
    places = {0, len(line)}
    for end in np.cumsum([len(stage.ops) for stage in plan.stages]).tolist():
        places.update(range(max(end - near, 0), min(end + near, len(line)) + 1))
    slowest = max(sum(problem.stage_times(stage.ops, b, stage.devices)) for stage in plan.stages)
    program = PartitionSearch(SPStructure(costs, None, line, sorted(places)), depth_scale=plan.depth / len(plan.stages))
    limits = slowest * np.linspace(*FINER, NUM_FINER)
    solved = program.solve(Lanes(np.full(NUM_FINER, b), limits))
    devices, found = solved.devices[0], []
    for h in range(1, devices.shape[1]):
        fits = np.flatnonzero(devices[:, h] <= costs.cluster.num_devices)
        if len(fits) and devices[fits[0], h] < devices[fits[0], h - 1]:
            candidate = incumbent.assessor.assess(solved.parts(int(fits[0]), h)[0], b)
            if isinstance(candidate, Candidate):
                found.append(candidate)
    incumbent.simulate_all(found, 2)


def spread(incumbent: Incumbent, plan: Plan) -> None:
    """Simulate the plan with idle devices dealt out, where they lower the stages' bounds most, as long as they do.

    A stage may get replicas, or its branches or its two halves a device each: what waits for a slow stage then waits less.
    Often no single step lowers the largest bound (several towers are equally long), so the sum of powers decides here too.
    Each step is the best of its moment, so what comes out with replicas alone may be better than with cuts too: both are tried.
    """
    b = plan.stages[0].microbatch_size
    bounds_s = cache(lambda parts: incumbent.assessor.stage_bounds_s(parts, b))
    for cuts in (False, True):
        _spread(incumbent, plan, bounds_s, cuts)


def _spread(incumbent: Incumbent, plan: Plan, bounds_s: Callable[[Parts], list[float] | None], cuts: bool) -> None:
    assessor = incumbent.assessor
    b, idle = plan.stages[0].microbatch_size, assessor.cluster.num_devices - plan.num_devices
    parts = tuple((sum(1 << op for op in stage.ops), len(stage.devices)) for stage in plan.stages)
    scale = max(bounds_s(parts) or [1.0])

    def norm(parts: Parts) -> float:
        # The mean, not the sum: a stage that is cut must not count twice.
        bounds = bounds_s(parts)
        return sum((bound / scale) ** POWER for bound in bounds) / len(bounds) if bounds else float("inf")

    best, tried = norm(parts), []
    while idle > 0:
        moves, looked_at = [], range(len(parts))
        if len(parts) > MANY_STAGES:
            if len(tried) == FEW_STEPS:
                break
            bounds = bounds_s(parts) or []
            looked_at = sorted(range(len(bounds)), key=lambda s, own=bounds: -own[s])[:SLOWEST]
        for s in looked_at:
            for pieces in _finer(assessor.costs, parts[s], b, cuts):
                extra = sum(r for _, r in pieces) - parts[s][1]
                if 0 < extra <= idle:
                    # What a device gains: large steps must not win only by being large.
                    finer = (*parts[:s], *pieces, *parts[s + 1 :])
                    found = norm(finer)
                    moves.append(((best - found) / extra, -s, found, finer))
        gain, _, found, finer = max(moves, default=(0.0, 0, 0.0, parts))
        if gain <= 1e-6 * best:
            break
        parts, best = finer, found
        idle = assessor.cluster.num_devices - sum(r for _, r in parts)
        tried.append(assessor.assess(parts, b))
    incumbent.simulate_all([candidate for candidate in tried if isinstance(candidate, Candidate)], 2)


def _finer(costs: StageCosts, part: Part, b: int, cuts: bool) -> list[list[Part]]:
    """A stage with the next number of replicas, and, with `cuts`, in two: its branches dealt out, or its operators halved."""
    mask, r = part
    more = next((x for x in costs.replicas[b] if x > r), None)
    out: list[list[Part]] = [[(mask, more)]] if more is not None else []
    if not cuts or not mask & (mask - 1):
        return out
    first, second = halves(costs, mask, b // r)
    return [*out, [(first, r), (second, r)]]
