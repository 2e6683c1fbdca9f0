"""The plan that people make by hand: as many stages as devices, of about equal time, in the order of the model.

Objective: equal forward-plus-backward time of all stages for one sample per device; the micro-batch
size with the best predicted iteration time wins.

Constraints:
1. Stages are intervals of one topological order (`depth_first_order`), one for each device: `even_cut`.
2. Memory: the stage at position s from the end keeps min(s * b, mini-batch) samples: `Assessor.assess`.
3. All stages use the same b; no stage is replicated: `plan`.

Complexity: O(n) for the cut, one simulation for each micro-batch size that fits.

Departures: none; there is no publication. It is the baseline of the tutorials of pipeline libraries.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise
from typing import ClassVar, final

from gpp.cost.problem import Problem
from gpp.graph.op_graph import mask_of
from gpp.plan.plan import Plan
from gpp.planners.base import AbstractPlanner, Predict
from gpp.planners.common.candidates import Assessor, Candidate
from gpp.planners.common.incumbent import Incumbent
from gpp.planners.common.infeasible import explain
from gpp.planners.common.linear_orders import depth_first_order
from gpp.planners.common.stage_costs import StageCosts
from gpp.settings import settings


@final
@settings("strategy.planner")
class Even(AbstractPlanner):
    """A chain of `num_devices` stages of about equal time."""

    fills: ClassVar[bool] = True

    def plan(self, problem: Problem, predict: Predict) -> Plan:
        """A plan with the best micro-batch size.

        >>> [stage.ops for stage in Even().plan(problem, predict).stages]
        [(0,), (1,)]
        """
        devices = problem.cluster.num_devices
        incumbent = Incumbent(Assessor(StageCosts(problem, replication=False)), "even", predict)
        candidates = even_candidates(incumbent.assessor)
        incumbent.simulate_all(candidates)
        if incumbent.best is None:
            raise explain(problem, self._attempt)
        text = f"{devices} stages of about equal time; {len(candidates)} of {len(problem.microbatch_sizes())} micro-batch sizes fit"
        return replace(incumbent.best, explanation=(text,))

    def _attempt(self, problem: Problem) -> Candidate | None:
        return next(iter(even_candidates(Assessor(StageCosts(problem, replication=False)))), None)


def even_candidates(assessor: Assessor) -> list[Candidate]:
    """The even cut of the depth-first order, one stage a device, with every micro-batch size that fits."""
    order = depth_first_order(assessor.graph)
    seconds = assessor.costs.op_seconds()
    chunks = even_cut([seconds[op] for op in order], min(assessor.cluster.num_devices, len(order)))
    parts = [(mask_of(order[i:j]), 1) for i, j in chunks]
    found = (assessor.assess(parts, b, chain=True) for b in assessor.costs.microbatch_sizes)
    return [candidate for candidate in found if isinstance(candidate, Candidate)]


def even_cut(weights: list[float], parts: int) -> list[tuple[int, int]]:
    """Cut a list into `parts` non-empty intervals, each cut at the place nearest to its share of the total.

    >>> even_cut([1, 1, 1, 1], 2), even_cut([3, 1, 1, 1], 2)
    ([(0, 2), (2, 4)], [(0, 1), (1, 4)])
    """
    prefix = [0.0, *accumulate(weights)]
    cuts = [0]
    for p in range(1, parts):
        target = prefix[-1] * p / parts
        places = range(cuts[-1] + 1, len(weights) - (parts - p) + 1)
        cuts.append(min(places, key=lambda i: (abs(prefix[i] - target), i)))
    cuts.append(len(weights))
    return list(pairwise(cuts))
