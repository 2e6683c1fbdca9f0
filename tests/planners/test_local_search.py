"""The local search, its moves, and the dynamic program over boundaries."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from gpp import Even, OneFOneB, Strategy
from gpp.planners.common.candidates import Assessor, Candidate
from gpp.planners.common.incumbent import Incumbent
from gpp.planners.common.linear_orders import depth_first_order
from gpp.planners.common.local_search import Hill, climb, climb_best
from gpp.planners.common.moves import ANY_STAGES, CHAINS, Around, Point, merges, replicas, splits
from gpp.planners.common.stage_costs import StageCosts
from tests.support.problems import random_problem


@dataclass
class Numbers(Hill[int]):
    """Integers, each beside its two neighbours; `seconds` from a list."""

    times: list[float]
    bounds: list[float] | None = None
    asked: list[int] = field(default_factory=list)

    def neighbours(self, state: int, below_s: float) -> Iterator[tuple[float, int]]:
        for other in (state - 1, state + 1):
            if 0 <= other < len(self.times):
                yield (self.bounds or [0.0] * len(self.times))[other], other

    def seconds(self, state: int, below_s: float) -> float | None:
        if state in self.asked:
            return None
        self.asked.append(state)
        return self.times[state]


def test_climbs_to_the_next_top() -> None:
    times = [9.0, 5.0, 6.0, 3.0, 4.0, 1.0]
    assert climb(Numbers(times), [(0, 9.0)]) == (1, 5.0)


def test_starts_from_the_best_of_several_and_asks_for_nothing_twice() -> None:
    hill = Numbers([5.0, 4.0, 3.0, 9.0, 9.0, 9.0, 2.0, 7.0])
    assert climb(hill, [(0, 5.0), (7, 7.0)]) == (6, 2.0)
    assert len(hill.asked) == len(set(hill.asked))


def test_what_cannot_win_is_not_predicted() -> None:
    hill = Numbers([1.0, 2.0, 1.0], bounds=[2.0, 2.0, 2.5])
    assert climb(hill, [(1, 2.0)]) == (1, 2.0) and not hill.asked


def around_and_point(seed: int) -> tuple[Around, Point] | None:
    problem = random_problem(seed, max_ops=12, max_devices=6)
    assessor = Assessor(StageCosts(problem))
    strategy = Strategy(name="test", planner=Even(), schedule=OneFOneB())
    incumbent = Incumbent(assessor, "test", lambda plan: strategy.predict(plan, problem, record=False))
    ops = depth_first_order(problem.graph)
    half = len(ops) // 2
    parts = [(sum(1 << op for op in some), 1) for some in (ops[:half], ops[half:]) if some]
    found = assessor.assess(parts[: problem.cluster.num_devices], problem.microbatch_sizes()[0])
    if not isinstance(found, Candidate) or len(found.parts) < 2:
        return None
    assert incumbent.simulate(found) is not None and incumbent.best is not None
    around = Around(assessor=assessor, hot=frozenset(range(len(found.parts))))
    return around, Point.of(incumbent.best, problem.graph)


@pytest.mark.parametrize("seed", range(8))
def test_moves_keep_every_operator_once_and_no_device_twice(seed: int) -> None:
    found = around_and_point(seed)
    if found is None:
        return
    around, point = found
    for move in ANY_STAGES:
        others = list(move(around, point))
        assert others == list(move(around, point))  # in a fixed order
        for other in others:
            masks = [mask for mask, _ in other.parts]
            assert sum(masks) == around.graph.all_mask and all(masks)
            assert not any(a & b for a, b in itertools.combinations(masks, 2))
            assert len(other.parts) == len(other.sizes) == len(other.ks)
            assert all(size % count == 0 for size, (_, count) in zip(other.sizes, other.parts, strict=True))
            assert around.idle(other) >= 0
    assert all(len(other.parts) == len(point.parts) - 1 for other in merges(around, point))
    assert all(len(other.parts) == len(point.parts) + 1 for other in splits(around, point))
    assert all(other.parts != point.parts for other in replicas(around, point))


@pytest.mark.parametrize("seed", range(5))
def test_a_climb_of_chains_stays_with_intervals_and_is_never_worse(seed: int) -> None:
    problem = random_problem(seed, max_ops=12, max_devices=6)
    strategy = Strategy(name="test", planner=Even(), schedule=OneFOneB())
    incumbent = Incumbent(Assessor(StageCosts(problem)), "test", lambda plan: strategy.predict(plan, problem, record=False))
    order = depth_first_order(problem.graph)
    place = {op: i for i, op in enumerate(order)}
    for b in problem.microbatch_sizes():
        whole = incumbent.assessor.assess([(problem.graph.all_mask, 1)], b, chain=True)
        if isinstance(whole, Candidate):
            incumbent.simulate(whole)
    before = incumbent.best_s
    climb_best(incumbent, 6, moves=CHAINS, order=order)
    assert incumbent.best_s <= before
    if incumbent.best is not None:
        for stage in incumbent.best.stages:
            places = sorted(place[op] for op in stage.ops)
            assert places == list(range(places[0], places[0] + len(places)))
