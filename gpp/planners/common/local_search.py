"""The local search of all planners: from a plan to its best neighbour, as long as predictions fall.

Objective: the predicted iteration time. A *hill* says which neighbours a state has, with a lower bound on the time of each, and
what a state takes; `climb` simulates the neighbours by ascending bound until none can win or patience is at its end, goes to
the best one and starts again there. What is searched differs by hill alone:

* `EqualMicrobatches`: plans of one micro-batch size, judged by `Assessor`, with any set of moves (`moves`);
* `vary` (a size and k for each stage) has a hill of its own.

Complexity: a step bounds every neighbour, of which a plan of S stages has O(S (replicas + operators)), and simulates
`patience` of them in a row that gain nothing.
Deterministic: ties go to the neighbour that was named first.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Generic, TypeVar, final

from gpp.cost.problem import Problem
from gpp.plan.plan import Plan
from gpp.planners.common.candidates import Candidate
from gpp.planners.common.incumbent import MARGIN, Incumbent
from gpp.planners.common.moves import ANY_STAGES, Around, Move, Point

State = TypeVar("State")

ENOUGH = 5e-3
"""Relative gain of a step below which climbing ends."""

ALL_STAGES = 8
"""Plans of at most so many stages are changed everywhere, larger ones where they are slowest."""

MANY_STAGES, MOST_HOT = 100, 12
"""Stages of a plan from which on only so many of the slow ones are changed: each change judges a whole plan."""

HOT = 0.9
"""Share of a plan's bound from which on a stage that keeps it up alone counts as slow."""

LARGE = 100_000
"""Operators times devices from which on every simulation takes a second."""

PATIENCE_IF_LARGE = 2
"""Simulations without a better plan that end a step of the search there."""


def is_large(problem: Problem) -> bool:
    """Whether a problem is so large that only few simulations are made."""
    return problem.graph.num_ops * problem.cluster.num_devices >= LARGE


def in_vain(problem: Problem, patience: int) -> int:
    """The number of simulations without a better plan after which a step of a search ends."""
    return min(patience, PATIENCE_IF_LARGE) if is_large(problem) else patience


class Hill(ABC, Generic[State]):
    """The states of a search, their neighbours and what they take."""

    @abstractmethod
    def neighbours(self, state: State, below_s: float) -> Iterable[tuple[float, State]]:
        """Lower bounds and neighbours that might take less than `below_s`, in a fixed order."""

    @abstractmethod
    def seconds(self, state: State, below_s: float) -> float | None:
        """The prediction of a neighbour; None if it cannot be below `below_s`, was predicted before, or may not be any more."""


def climb(
    hill: Hill[State], starts: Sequence[tuple[State, float]], *, patience: int | None = None, least_gain: float = 0.0
) -> tuple[State, float]:
    """The best state that is found from some, and its predicted seconds.

    From each start the search climbs as long as a step gains enough.

    Args:
        starts: states, and the predicted seconds of each.
        patience: predictions without a better state that end a step; None for no end.
        least_gain: relative gain of a step below which it counts as none.
    """

    def step(state: State, seconds: float) -> tuple[State, float]:
        """The best neighbour that takes less than `seconds`, or the state itself."""
        left = patience
        found = [(bound, at, other) for at, (bound, other) in enumerate(hill.neighbours(state, seconds))]
        for bound, _, other in sorted(found, key=itemgetter(0, 1)):
            if left == 0 or bound >= seconds * MARGIN:
                break
            took = hill.seconds(other, seconds)
            if took is None:
                continue
            if took < seconds * MARGIN:
                state, seconds, left = other, took, patience
            elif left is not None and took < math.inf:
                left -= 1
        return state, seconds

    tops = []
    for state, seconds in starts:
        before = math.inf
        while seconds < before * (1 - least_gain):
            before = seconds
            state, seconds = step(state, seconds)
        tops.append((state, seconds))
    return min(tops, key=itemgetter(1))


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class EqualMicrobatches(Hill[Candidate]):
    """Plans in which all stages have one micro-batch size.

    Args:
        moves: to the neighbours of a plan.
        order: an order of the operators in which all stages stay intervals; None for stages of any shape.
        keeps_devices: whether moves start from the plan's own devices; else the placer places every neighbour anew.
        all_stages: plans of at most so many stages are changed everywhere.
    """

    incumbent: Incumbent
    moves: tuple[Move, ...] = ANY_STAGES
    order: Sequence[int] | None = None
    keeps_devices: bool = False
    all_stages: int = ALL_STAGES

    def neighbours(self, state: Candidate, below_s: float) -> list[tuple[float, Candidate]]:
        assessor, count, chain = self.incumbent.assessor, len(state.parts), state.chain or self.order is not None
        hot = frozenset(range(count))
        if count > self.all_stages:
            most = MOST_HOT if count > MANY_STAGES else None
            hot = frozenset(assessor.slow_parts(state.parts, state.microbatch_size, HOT, chain=chain, most=most))
        sizes, devices = (state.microbatch_size,) * count, state.placement if self.keeps_devices else None
        point = Point(parts=state.parts, sizes=sizes, ks=(1,) * count, chain=chain, devices=devices)
        around = Around(assessor=assessor, hot=hot, order=self.order)
        points = dict.fromkeys(other for move in self.moves for other in move(around, point))
        verdicts = (
            assessor.assess(other.parts, other.sizes[0], chain=other.chain, placement=other.devices, below_s=below_s)
            for other in points
        )
        found = {verdict for verdict in verdicts if isinstance(verdict, Candidate)}
        # Shallow ones first among equal bounds.
        return [(candidate.bound_s, candidate) for candidate in sorted(found)]

    def seconds(self, state: Candidate, below_s: float) -> float | None:
        return self.incumbent.simulate(state, below_s=below_s)

    def start(self, plan: Plan) -> Candidate:
        """The state of a plan."""
        graph = self.incumbent.assessor.graph
        point = Point.of(plan, graph)
        assert point.devices is not None
        return Candidate(0.0, plan.depth, point.sizes[0], point.chain, point.parts, point.devices)


def climb_best(
    incumbent: Incumbent,
    patience: int,
    *,
    moves: tuple[Move, ...] = ANY_STAGES,
    order: Sequence[int] | None = None,
    starts: int = 1,
) -> None:
    """Climb from the incumbent's best plans, one for each of the `starts` micro-batch sizes with the best ones."""
    hill = EqualMicrobatches(incumbent=incumbent, moves=moves, order=order)
    found = [(hill.start(plan), seconds) for plan, seconds in incumbent.best_by_size()[:starts]]
    if found:
        climb(hill, found, patience=patience, least_gain=ENOUGH)
