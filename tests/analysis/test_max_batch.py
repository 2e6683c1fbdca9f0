"""The largest micro-batch: against a scan of all sizes, and where sizes in between are refused."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from gpp import Auto, DoubleBuffer, Even, GraphPipe, NoFlush, OneFOneB, PipeDream2BW, Plan, Recompute, Stash, Strategy
from gpp.analysis.comparison import attempt
from gpp.analysis.max_batch import at_size, largest, step_at
from gpp.app.surveys import scaled
from gpp.cost.problem import Problem
from gpp.errors import Infeasible
from gpp.plan.build import make_plan
from gpp.planners.base import AbstractPlanner, Predict
from gpp.report.compare.boundaries import cells, ends
from gpp.report.run.strategies import boundary_dicts
from tests.checks.memory import random_problem
from tests.support.graphs import chain, problem


@dataclass(frozen=True, slots=True, kw_only=True)
class UpTo(AbstractPlanner):
    """Has a plan up to a micro-batch, with gaps."""

    most: int
    gaps: frozenset[int] = field(default_factory=frozenset)

    def plan(self, problem: Problem, predict: Predict) -> Plan:
        b = problem.microbatch_size or 0
        if b > self.most or b in self.gaps:
            raise Infeasible(f"{b} does not fit", "less")
        return make_plan(problem, "up_to", [(problem.graph.all_mask, 1)], b)


def up_to(most: int, *gaps: int) -> Strategy:
    return Strategy(name="up_to", planner=UpTo(most=most, gaps=frozenset(gaps)), schedule=OneFOneB())


@pytest.mark.parametrize("memory_bytes", [10.0, 77.0, 300.0, 1000.0])
def test_it_is_the_one_that_a_scan_of_all_sizes_finds(memory_bytes: float) -> None:
    given = problem(chain(4), 2, 8, microbatch_size=2, memory_bytes=memory_bytes)
    even = Strategy(name="even", planner=Even(), schedule=OneFOneB())
    fitting = [b for b in range(1, 400) if attempt(even, at_size(given, b, 4), record=False).status == "ok"]
    found = largest(even, given)
    step = step_at(found.microbatch_size)
    assert fitting == list(range(1, fitting[-1] + 1)), "no gaps here"
    assert found.microbatch_size == fitting[-1] - fitting[-1] % step and step <= max(1, found.microbatch_size / 32)
    assert found.beyond == found.microbatch_size + step and found.microbatches == 4
    plan = found.best.plan
    assert plan is not None and found.best.predicted is not None and plan.minibatch_size == 4 * found.microbatch_size
    assert {stage.microbatch_size for stage in plan.stages} == {found.microbatch_size}
    assert len(found.tried) <= 2 * found.microbatch_size.bit_length() + 3, "doubling and bisection, not a scan"


@dataclass(frozen=True, slots=True, kw_only=True)
class Asks(AbstractPlanner):
    """Has a candidate in two stages, then one in one stage, and notes what it is told of them."""

    told: list[float]

    def plan(self, problem: Problem, predict: Predict) -> Plan:
        plans = [make_plan(problem, "asks", parts, problem.microbatch_size or 1) for parts in ([(1, 1), (14, 1)], [(15, 1)])]
        for plan in plans:
            self.told.append(predict(plan).metrics.iteration_s)
        return plans[1]


def test_any_plan_that_fits_ends_a_search_for_the_first() -> None:
    told = list[float]()
    strategy = Strategy(name="asks", planner=Asks(told=told), schedule=OneFOneB(), memory=Recompute())
    given = problem(chain(4), 2, 8, microbatch_size=2)
    assert len(strategy.plan(given, first=True).stages) == 2 and told == [], "it ends within the first prediction"
    assert len(strategy.plan(given).stages) == 1 and len(told) > 1


def test_a_first_plan_is_there_where_a_plan_is() -> None:
    graphpipe = Strategy(name="graphpipe", planner=GraphPipe(), schedule=OneFOneB(), memory=Auto())
    both = Counter[tuple[str, str]]()
    for seed in (1, 2, 3):
        given = random_problem(random.Random(f"first-{seed}"))
        first, best = (attempt(graphpipe, given, record=False, first=first) for first in (True, False))
        both[first.status, best.status] += 1
        assert first.iteration_s >= best.iteration_s * (1 - 1e-9) and first.reason == best.reason
    assert set(both) == {("ok", "ok"), ("infeasible", "infeasible")}


def test_one_refusal_is_no_end() -> None:
    given, tried = problem(chain(2), 1, 4, microbatch_size=2), list[tuple[str, int]]()
    found = largest(up_to(100, 1, 16), given, lambda name, size: tried.append((name, size)))
    assert (found.microbatch_size, found.beyond, found.reason) == (100, 102, "102 does not fit")
    assert [size for _, size in tried] == [size for size, _ in found.tried] and ("up_to", 16) in tried
    assert dict(found.tried)[1] is False and dict(found.tried)[64] is True and len(dict(found.tried)) == len(found.tried)
    none = largest(up_to(0), given)
    assert (none.microbatch_size, none.beyond, len(none.tried)) == (0, 1, 2) and none.best.plan is None
    (described,) = boundary_dicts([none])
    assert described["microbatch_size"] is None and described["minibatch_size"] is None and described["reason"]
    assert cells(none)["largest b"] == "–" and ends([none]) == []


def test_the_number_of_micro_batches_stays() -> None:
    given = problem(chain(4), 4, 8, microbatch_size=2, memory_bytes=1000.0)
    stash = Strategy(name="stash", planner=PipeDream2BW(replication=False), schedule=NoFlush(), weights=Stash())
    twice = Strategy(name="2bw", planner=PipeDream2BW(replication=False), schedule=NoFlush(), weights=DoubleBuffer())
    # A pipeline that does not drain updates after each of its mini-batches, which may be one micro-batch.
    assert largest(stash, given).microbatches == 1
    assert largest(twice, given).microbatches == DoubleBuffer().least_accumulation(4) > 1
    open_size = problem(chain(4), 4, 8, memory_bytes=1000.0)
    assert largest(up_to(5), open_size).microbatches == 4 and largest(up_to(5), given).best.plan.minibatch_size == 20  # type: ignore[union-attr]


def test_the_same_stages_with_another_micro_batch() -> None:
    given = problem(chain(4), 2, 24, microbatch_size=4)
    plan = make_plan(given, "two", [(0b0011, 1), (0b1100, 1)], 4)
    other = scaled(plan, 4, 5)
    other.validate(at_size(given, 5, 6))
    assert [stage.microbatch_size for stage in other.stages] == [5, 5] and other.minibatch_size == 30
    assert [stage.ahead for stage in other.stages] == [stage.ahead for stage in plan.stages] == [2, 1]
