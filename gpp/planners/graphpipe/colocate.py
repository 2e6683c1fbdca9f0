"""Devices that hold several stages: plans that share devices, as a dimension of the search.

A stage starts when all that it receives is there, and sends when all of it is done. A device with one stage therefore waits in
three ways that a device with several does not:

* a branch and the join behind it: the branch needs nothing from the others, but in one stage with the join it waits for them;
* several branches: each goes on when its own inputs are there, and hands on its own results;
* chunks of a chain (virtual stages, as in Megatron's interleaved schedule, or there and back, as in zero bubble's V): while one
  chunk waits for the pipeline to fill or to drain, the other has work.

Objective: the predicted iteration time under the strategy's own schedule, which merges the orders of a device's stages
(`gpp.schedules.merge`).

Constraints: the stages of a device fit into its memory together, each with its own samples in flight (`Assessor.assess`); one
micro-batch size for all stages; weights that drain, since programs that go on over mini-batches have one stage a device.

Search: a climb (`common.local_search.climb`) from layouts made for sharing (`layouts`), and from the best chains of the
disjoint search with the data's edges only, whose busiest device has less to do than the best plan takes; one start after the other,
each with a budget of its own.
Neighbours: a stage cut in two on its own devices, two stages of a device joined, a stage or a piece of one on another device, two
stages exchanged, operators moved over a boundary, another micro-batch size. They are simulated by ascending bound; the bound counts
what a device has to do for all of its stages. Nothing is searched where the best plan leaves no device idle.

Complexity: `_Effort.passes` bounds the passes that are simulated from a start, so a search takes about as long however large the
problem; a step bounds O(S (pieces x devices + operators)) neighbours.

Source: none for the search; the GraphPipe paper gives every stage devices of its own. Layouts: Narayanan et al., SC '21
(interleaved); Qi et al., "Zero Bubble Pipeline Parallelism", ICLR '24 (V).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, final

from gpp.graph.series_parallel import Order
from gpp.planners.common.candidates import Candidate
from gpp.planners.common.incumbent import Incumbent
from gpp.planners.common.local_search import Hill, assess, climb
from gpp.planners.common.moves import Around, Point, finer_boundaries
from gpp.planners.common.stage_costs import StageCosts
from gpp.planners.graphpipe.layouts import layouts
from gpp.planners.graphpipe.rough import rough_s
from gpp.planners.graphpipe.sharing import any_size, cut, exchanged, handed_over, joined, moved, scattered

Colocate = Literal["auto", "never", "always"]
"""Whether devices may hold several stages: as far as a budget reaches, not at all, or however long the search takes."""

WORTH = 1e-3
"""Relative gain below which devices keep one stage each: another stage is another action to dispatch."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Effort:
    """The effort of a search: how long it goes on.

    Args:
        starts: that are climbed from, the best ones.
        patience, steps: as `climb` has them.
        looked_at: neighbours that are estimated in each step, the best by a first look.
        passes: of all stages in all predictions.
    """

    starts: int
    patience: int
    steps: int
    looked_at: int
    passes: float


QUICK = _Effort(starts=2, patience=4, steps=2, looked_at=64, passes=30_000)
THOROUGH = _Effort(starts=6, patience=24, steps=6, looked_at=1024, passes=math.inf)

SIZES = 2
"""Micro-batch sizes, those of the best plans, that the search starts from."""

EVERYWHERE = 12
"""Plans of at most so many stages are changed everywhere, larger ones on the devices that have most to do."""

BUSIEST = 2
"""How many devices those are."""

MOST_STAGES = 4
"""Stages for each device of the cluster."""

LEAST = 10
"""Predictions for which a search must have the passes, or it is not begun."""

CAUTION = 0.95
"""Share of its rough estimate from which on a plan is worth a prediction."""

MOVES = (any_size, joined, cut, moved, scattered, exchanged, finer_boundaries, handed_over)


def colocate(incumbent: Incumbent, orders: Sequence[Order], lines: Sequence[tuple[int, ...]], how: Colocate) -> str:
    """Find plans that share devices and are faster than the incumbent's best.

    Args:
        orders, lines: series-parallel structures of the graph and linear orders of its operators, for `layouts`.

    Returns:
        What is known of such plans now, in words.
    """
    costs = incumbent.assessor.costs
    regime = costs.problem.regime
    if how == "never" or not regime.trains or not regime.weights.flushes:
        return "plans with several stages on a device were not tried"
    if not _leaves_idle(incumbent):
        return "plans with several stages on a device were not tried, as they could gain next to nothing"
    best, best_s = incumbent.best, incumbent.best_s
    effort = THOROUGH if how == "always" else QUICK
    hill = _Colocated(incumbent, effort)
    plans = [plan for plan, _ in incumbent.best_by_size()[:SIZES]]
    # Those that are no chains were simulated just so, and `judged` leaves them out.
    points = [replace(Point.of(plan, costs.graph), chain=False) for plan in plans]
    sizes = dict.fromkeys((*(plan.stages[0].microbatch_size for plan in plans), *_promising(costs)[:SIZES]))
    points += [point for b in sizes for point in layouts(costs, orders, lines, b)]
    for start in hill.judged(points)[: effort.starts]:
        # Each with the whole budget: another start never takes anything from those before it.
        climb(_Colocated(incumbent, effort), [start], patience=effort.patience, steps=effort.steps, margin=1 - WORTH)
    if best is not None and incumbent.best_s >= best_s * (1 - WORTH):
        incumbent.best, incumbent.best_s = best, best_s
    return "plans with several stages on a device were searched in part, by local search"


def _leaves_idle(incumbent: Incumbent) -> bool:
    """Whether always busy devices would beat the best plan by more than `WORTH`; else no plan can."""
    costs = incumbent.assessor.costs
    return _always_busy_s(costs, _promising(costs)[0]) < incumbent.best_s * (1 - WORTH)


def _promising(costs: StageCosts) -> list[int]:
    """Micro-batch sizes, those first whose passes take least."""
    return sorted(costs.microbatch_sizes, key=lambda b: (_always_busy_s(costs, b), b))


def _always_busy_s(costs: StageCosts, b: int) -> float:
    """Seconds of an iteration in which no device ever waits."""
    return costs.problem.minibatch_size // b * costs.least_work_s(costs.graph.all_mask, b) / costs.cluster.num_devices


@final
@dataclass(slots=True)
class _Colocated(Hill[Candidate]):
    """Plans of one micro-batch size in which a device may hold several stages."""

    incumbent: Incumbent
    effort: _Effort
    passes: int = 0

    def judged(self, points: Iterable[Point]) -> list[tuple[Candidate, float]]:
        """The points that fit and could win, best first, with their predicted seconds.

        Climbing makes devices wait less, so a start whose busiest device has less to do than the best plan takes could win, however
        long it takes itself.
        """
        found: dict[Candidate, float] = {}
        assessor, worth_s = self.incumbent.assessor, self.incumbent.best_s * (1 - WORTH)
        most = MOST_STAGES * assessor.cluster.num_devices
        for point in (point for point in points if len(point.parts) <= most):
            candidate = assess(assessor, self._canonical(point))
            if not isinstance(candidate, Candidate) or candidate in found:
                continue
            if max(assessor.loads_s(candidate.parts, candidate.placement, candidate.microbatch_size)) < worth_s:
                took = self.seconds(candidate, math.inf)
                if took is not None and took < math.inf:
                    found[candidate] = took
        return sorted(found.items(), key=lambda item: (item[1], item[0]))

    def neighbours(self, state: Candidate, below_s: float) -> list[tuple[float, Candidate]]:
        assessor, b = self.incumbent.assessor, state.microbatch_size
        point = Point(
            parts=state.parts,
            sizes=(b,) * len(state.parts),
            ks=(1,) * len(state.parts),
            chain=False,
            devices=state.placement,
        )
        around = Around(assessor=assessor, hot=self._hot(state))
        most = MOST_STAGES * assessor.cluster.num_devices
        others = (other for move in MOVES for other in move(around, point) if len(other.parts) <= most)
        points = dict.fromkeys(self._canonical(other) for other in others)
        found = {verdict for other in points if isinstance(verdict := assess(assessor, other, below_s), Candidate)}
        likely = sorted(found, key=lambda candidate: (self._first_look_s(candidate), candidate))[: self.effort.looked_at]
        return [(self._estimate_s(candidate), candidate) for candidate in likely]

    def _first_look_s(self, candidate: Candidate) -> float:
        """The seconds of a point's busiest device, and half of the way of a micro-batch through the pipeline."""
        assessor, b = self.incumbent.assessor, candidate.microbatch_size
        loads = assessor.loads_s(candidate.parts, candidate.placement, b)
        return max(loads) + assessor.way_s(candidate.parts, candidate.placement, b) / 2

    def seconds(self, state: Candidate, below_s: float) -> float | None:
        passes = 2 * self.incumbent.assessor.problem.minibatch_size // state.microbatch_size
        passes *= sum(count for _, count in state.parts)
        if self.passes + passes > self.effort.passes or passes > self.effort.passes / LEAST:
            return None
        found = self.incumbent.simulate(state, below_s=below_s)
        if found is None:
            return None
        self.passes += passes
        return found[1]

    def _estimate_s(self, candidate: Candidate) -> float:
        """A little less than it may take: what decides in which order candidates are predicted, and whether at all."""
        rough = rough_s(self.incumbent.assessor, candidate.parts, candidate.placement, candidate.microbatch_size)
        return max(candidate.bound_s, CAUTION * rough)

    def _hot(self, state: Candidate) -> frozenset[int]:
        """The stages that moves start from."""
        if len(state.parts) <= EVERYWHERE:
            return frozenset(range(len(state.parts)))
        loads = self.incumbent.assessor.loads_s(state.parts, state.placement, state.microbatch_size)
        busiest = set(sorted(range(len(loads)), key=lambda d: (-loads[d], d))[:BUSIEST])
        return frozenset(s for s, devices in enumerate(state.placement) if busiest.intersection(devices))

    def _canonical(self, point: Point) -> Point:
        """The point with equal devices numbered as they appear, so that what differs by their names alone is tried once."""
        cluster = self.incumbent.assessor.cluster
        if not cluster.homogeneous or len(set(cluster.nodes)) > 1 or point.devices is None:
            return point
        number: dict[int, int] = {}
        by_first = sorted(range(len(point.parts)), key=lambda s: point.parts[s][0] & -point.parts[s][0])
        for s in by_first:
            for device in point.devices[s]:
                number.setdefault(device, len(number))
        return replace(point, devices=tuple(tuple(sorted(number[d] for d in own)) for own in point.devices))
