"""Plans for streams of requests, as a strategy asks for them."""

from __future__ import annotations

from gpp.cost.problem import Problem
from gpp.mechanisms.serving.simulated import questions, scored, serve
from gpp.mechanisms.serving.stream import check_served
from gpp.plan.plan import Plan
from gpp.program.program import Program
from gpp.simulate.added import AbstractPlanning, Objective
from gpp.timeline import Timeline


class StreamPlanning(AbstractPlanning):
    """Plans that answer requests."""

    def check(self, plan: Plan) -> None:
        check_served(plan)

    def predict(self, program: Program, plan: Plan, problem: Problem, objective: Objective | None) -> Timeline:
        return serve(program, plan, problem) if objective is None else scored(program, plan, problem, objective)

    def questions(self, problem: Problem, objective: Objective, ahead: int) -> list[Problem]:
        return questions(problem, objective, ahead)


PLANNING = StreamPlanning()
