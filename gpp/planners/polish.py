"""Two quick improvements of a finished plan that change many stages at once.

`polish` moves all borders together: the stages, laid one after the other, are a line of operators, and a dynamic program picks every
border within a window around its place so that the sum of the eighth powers of the stages' times is least, which is nearly
the longest time, with an opinion on the others too. `spread` deals idle devices out as replicas, one stage at a time, as long as the bound falls.
"""

from __future__ import annotations

import numpy as np

from gpp.plan import Plan
from gpp.planners.candidates import Candidate, Search
from gpp.planners.chains import Intervals

WINDOW = 12
"""Operators by which a border may move to either side."""

POWER = 8.0
"""Of the stages' times, summed."""

LONGEST_LINE = 600
"""Operators up to which the tables of all intervals are worth their memory."""


def polish(search: Search, plan: Plan) -> None:
    """Simulate the plan with all borders at their best places."""
    costs, problem = search.assessor.costs, search.assessor.problem
    line = tuple(op for stage in plan.stages for op in stage.ops)
    if len(plan.stages) < 2 or len(line) > LONGEST_LINE:
        return
    b = plan.stages[0].microbatch_size
    most = problem.minibatch_size // b
    table = Intervals(costs, line)
    ends = np.cumsum([len(stage.ops) for stage in plan.stages]).tolist()
    places = [np.array([0])]
    for s, end in enumerate(ends[:-1]):
        # Windows of neighbours do not overlap, so every stage keeps an operator.
        low = max(end - WINDOW, (ends[s - 1] if s else 0) + (end - (ends[s - 1] if s else 0)) // 2 + 1)
        high = min(end + WINDOW, end + (ends[s + 1] - end) // 2)
        places.append(np.arange(min(low, end), max(high, end) + 1))
    places.append(np.array([ends[-1]]))
    scale = None
    value, choices = np.zeros(1), []
    for s, stage in enumerate(plan.stages):
        i, j = places[s][:, None], places[s + 1][None, :]
        r = len(stage.devices)
        samples = b // r
        prefix = table.prefix_s[costs.row(samples)]
        seconds = np.maximum(prefix[j] - prefix[i], table.grads[i, j] * (samples / costs.link.bandwidth_bytes_per_s))
        seconds = seconds + costs.finish_array_s(table.trainable[i, j], r) / most
        held = stage.in_flight // b
        need = table.static[i, j] + (table.kept[i, j] * held + table.grads[i, j]) * samples
        scale = scale or float(seconds.max()) or 1.0
        cost = np.where((need <= costs.limit_bytes * (1 + 1e-9)) & (j > i), (seconds / scale) ** POWER, np.inf)
        total = value[:, None] + cost
        choices.append(total.argmin(axis=0))
        value = total.min(axis=0)
    if not np.isfinite(value[0]):
        return
    at, cuts = 0, [ends[-1]]
    for s in range(len(plan.stages) - 1, -1, -1):
        at = int(choices[s][at])
        cuts.append(int(places[s][at]))
    cuts.reverse()
    parts = [(sum(1 << op for op in line[cuts[s] : cuts[s + 1]]), len(stage.devices)) for s, stage in enumerate(plan.stages)]
    candidate = search.assessor.assess(parts, b)
    if isinstance(candidate, Candidate):
        search.simulate(candidate)


def spread(search: Search, plan: Plan) -> None:
    """Simulate the plan with idle devices dealt out as replicas where they lower its bound most, as long as they do."""
    assessor = search.assessor
    allowed = assessor.costs.replicas[plan.stages[0].microbatch_size]
    parts = [(sum(1 << op for op in stage.ops), len(stage.devices)) for stage in plan.stages]
    b, idle = plan.stages[0].microbatch_size, assessor.cluster.num_devices - plan.num_devices
    best = assessor.assess(parts, b)
    if not isinstance(best, Candidate):
        return
    improved = False
    while idle > 0:
        moves = []
        for s, (mask, r) in enumerate(parts):
            more = next((x for x in allowed if x > r), None)
            if more is not None and more - r <= idle:
                found = assessor.assess([*parts[:s], (mask, more), *parts[s + 1 :]], b)
                if isinstance(found, Candidate) and found.bound_s < best.bound_s * (1 - 1e-4):
                    moves.append((found.bound_s, s, more, found))
        if not moves:
            break
        _, s, more, best = min(moves, key=lambda move: move[:3])
        idle -= more - parts[s][1]
        parts[s], improved = (parts[s][0], more), True
    if improved:
        search.simulate(best)

