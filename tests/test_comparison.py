from __future__ import annotations

from dataclasses import dataclass

from gpp.comparison import attempt, best_of, compare
from gpp.cost.problem import Problem
from gpp.plan import Plan, make_plan
from gpp.planners.base import AbstractPlanner, Predict
from gpp.planners.even import Even
from gpp.planners.graphpipe import GraphPipe
from gpp.schedules.one_f_one_b import OneFOneB
from gpp.strategy import Strategy
from tests.graphs import problem, two_towers


@dataclass(frozen=True, slots=True, kw_only=True)
class Broken(AbstractPlanner):
    def plan(self, problem: Problem, predict: Predict) -> Plan:
        raise ZeroDivisionError("a bug")


@dataclass(frozen=True, slots=True, kw_only=True)
class Told(AbstractPlanner):
    def plan(self, problem: Problem, predict: Predict) -> Plan:
        words = ("own objective: 0.0125 s a micro-batch for the slowest stage, over chains",)
        return make_plan(problem, "told", [(problem.graph.all_mask, 1)], 1, explanation=words)


def strategies(*planners: AbstractPlanner) -> list[Strategy]:
    return [Strategy(name=type(p).__name__.lower(), planner=p, schedule=OneFOneB()) for p in planners]


def test_every_strategy_has_its_line_whatever_becomes_of_it() -> None:
    begun: list[str] = []
    given = problem(two_towers(3), 4, 8)
    found = compare(strategies(Broken(), Even(), GraphPipe(), Told()), given, begun.append)
    assert begun == ["broken", "even", "graphpipe", "told"] == [a.strategy for a in found]
    assert [a.status for a in found] == ["failed", "ok", "ok", "ok"]
    assert found[0].reason == "ZeroDivisionError: a bug" and found[0].plan is None
    best = best_of(found)
    assert best is not None and best.strategy == "graphpipe" and best.predicted and best.predicted.events
    assert found[3].objective == "0.0125 s a micro-batch for the slowest stage" and found[3].objective_s == 0.0125
    assert found[1].objective is None and found[1].objective_s is None


def test_nothing_fits() -> None:
    given = problem(two_towers(3), 4, 8, memory_bytes=0.5)
    found = attempt(strategies(Even())[0], given)
    assert found.status == "infeasible" and "Smallest change that fits" in (found.reason or "") and found.search_s > 0
    assert best_of([found]) is None
