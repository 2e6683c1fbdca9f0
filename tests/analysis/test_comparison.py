from __future__ import annotations

import re
from dataclasses import dataclass, replace

import pytest

from gpp import Even, GraphPipe, NoFlush, OneFOneB, PipeDream2BW, Stash, Strategy
from gpp.analysis.comparison import attempt, best_of, compare
from gpp.cost.problem import Problem
from gpp.errors import InvalidPlan
from gpp.plan.build import make_plan
from gpp.plan.plan import Objective, Plan
from gpp.planners.base import AbstractPlanner, Predict
from gpp.planners.bounds.lower_bound import lower_bound
from gpp.report.run.strategies import best_lines, best_names, columns, compared_dicts, strategy_lines
from tests.support.graphs import chain, problem, two_towers


@dataclass(frozen=True, slots=True, kw_only=True)
class Broken(AbstractPlanner):
    def plan(self, problem: Problem, predict: Predict) -> Plan:
        raise ZeroDivisionError("a bug")


@dataclass(frozen=True, slots=True, kw_only=True)
class Silent(AbstractPlanner):
    def plan(self, problem: Problem, predict: Predict) -> Plan:
        return None  # type: ignore[return-value]


@dataclass(frozen=True, slots=True, kw_only=True)
class Told(AbstractPlanner):
    def plan(self, problem: Problem, predict: Predict) -> Plan:
        own = Objective(value_s=0.0125, scope="a micro-batch for the slowest stage")
        return replace(make_plan(problem, "told", [(problem.graph.all_mask, 1)], 1), objective=own)


def strategies(*planners: AbstractPlanner) -> list[Strategy]:
    return [Strategy(name=type(p).__name__.lower(), planner=p, schedule=OneFOneB()) for p in planners]


def test_every_strategy_has_its_line_whatever_becomes_of_it() -> None:
    begun: list[str] = []
    given = problem(two_towers(3), 4, 8)
    found = compare(strategies(Broken(), Even(), GraphPipe(), Told()), given, begun.append)
    assert begun == ["broken", "even", "graphpipe", "told"] == [a.strategy for a in found]
    assert [a.status for a in found] == ["failed", "ok", "ok", "ok"]
    line = Broken.plan.__code__.co_firstlineno + 1
    words = f"ZeroDivisionError: a bug (at {__file__}:{line}; mode=plan shows the traceback)"
    assert found[0].reason == words and found[0].plan is None
    best = best_of(found).own
    assert best is not None and best.strategy == "graphpipe" and best.predicted and best.predicted.events
    told = compared_dicts(found, None, None)
    assert (told[3]["objective"], told[3]["objective_s"]) == ("12.5 ms a micro-batch for the slowest stage", 0.0125)
    assert told[1]["objective"] is None and told[1]["objective_s"] is None
    assert [line.cells()["own objective"] for line in strategy_lines(found, None)] == ["–", "–", "–", "12.5 ms"]


def test_what_is_no_plan_says_what_is_wrong() -> None:
    given = problem(two_towers(3), 4, 8)
    (found,) = compare(strategies(Silent()), given)
    assert found.reason == (
        "Silent.plan returned None: a planner returns a plan (gpp.plan.build.make_plan makes one), or raises Infeasible"
    )
    every, first = given.graph.all_mask, given.graph.ops[0].name
    for parts, b, words in (
        ([(every & ~1, 1)], 1, f"operator 0 ({first}) is in no stage"),
        ([(every, 1), (1, 1)], 1, f"operator 0 ({first}) is in two stages"),
        ([(every | 1 << 99, 1)], 1, "operator 99 is none of the graph"),
        ([(every, 1)], [2.0], "a micro-batch of 2.0 samples"),
    ):
        with pytest.raises(InvalidPlan, match=re.escape(words)):
            make_plan(given, "mine", parts, b)  # type: ignore[arg-type]


def test_no_bound_speaks_of_a_pipeline_that_does_not_drain() -> None:
    given = problem(chain(4), 4, 16, microbatch_size=4)
    asynchronous = Strategy(name="stash", planner=PipeDream2BW(replication=False), schedule=NoFlush(), weights=Stash())
    found = compare([*strategies(Even()), asynchronous], given)
    # The faster one is no better than the other: it is another task.
    assert [a.drains for a in found] == [True, False] and found[1].iteration_s < found[0].iteration_s
    best = best_of(found)
    assert best.synchronous is found[0] and best.asynchronous is found[1] and best.own is found[0]
    assert best_of(found[1:]).own is found[1] and best_names(found[1:]) == {"synchronous": None, "asynchronous": "stash"}
    even, stash = strategy_lines(found, lower_bound(given))
    assert even.gap is not None and even.gap > 0 and stash.gap is None and stash.bound is None
    assert even.is_best and stash.is_best and even.relative == stash.relative == 1
    assert even.attempt.iteration_s / stash.attempt.iteration_s == pytest.approx((4 + 3) / 4)
    assert [words for words, _ in best_lines([even, stash])] == ["best synchronous", "best asynchronous"]
    assert [words for words, _ in best_lines([stash])] == ["best"]
    assert [line.cells()["stale"] for line in (even, stash)] == ["0", "1"] and "stale" in columns([even, stash])
    assert "stale" not in columns([even])
    assert [d["plan"]["optimality_gap"] is None for d in compared_dicts(found, lower_bound(given), 4)] == [False, True]


def test_nothing_fits() -> None:
    given = problem(two_towers(3), 4, 8, memory_bytes=0.5)
    found = attempt(strategies(Even())[0], given)
    assert found.status == "infeasible" and "Smallest change that fits" in (found.reason or "") and found.search_s > 0
    assert best_of([found]) == (None, None)
