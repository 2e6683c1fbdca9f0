"""Predictions that a mechanism makes itself: of plans whose step no simulation of their program would tell, and of pipelines that
train nothing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal

from gpp.cost.problem import Problem
from gpp.mechanism import parts
from gpp.plan.plan import Plan
from gpp.program.program import Program
from gpp.timeline import Timeline

Objective = Literal["throughput", "latency"]
"""What planners minimise where nothing is trained: seconds of a mini-batch at saturation, or its latency."""


class AbstractPrediction(ABC):
    """The prediction of a step, for plans of one mechanism."""

    @abstractmethod
    def predict(self, plan: Plan, problem: Problem, *, record: bool) -> Timeline:
        """One mini-batch of the steady state.

        Args:
            record: keep the events.
        """


def own_prediction(plan: Plan, problem: Problem, *, record: bool) -> Timeline | None:
    """The prediction of the plan's first mechanism that has one; None where a simulation predicts."""
    own = parts(plan.mechanisms, "prediction", "PREDICTION", AbstractPrediction)
    return own[0].predict(plan, problem, record=record) if own else None


class AbstractPlanning(ABC):
    """Plans of pipelines that train nothing: which there may be, and how long they take for a mini-batch."""

    @abstractmethod
    def check(self, plan: Plan) -> None:
        """Refuse a plan that cannot do it.

        Raises:
            InvalidPlan: names the stage, and what is in the way.
        """

    @abstractmethod
    def predict(self, program: Program, plan: Plan, problem: Problem, objective: Objective | None) -> Timeline:
        """The timeline of a plan.

        Args:
            program: the program of one mini-batch.
            objective: for the metrics alone, as a planner wants them: `iteration_s` is then the objective; None for all of it.
        """

    @abstractmethod
    def questions(self, problem: Problem, objective: Objective, ahead: int) -> list[Problem]:
        """The problems for a planner.

        Args:
            ahead: mini-batches for each device that a planner reckons with, where filling the pipeline is to count for little.
        """


def planning(problem: Problem) -> AbstractPlanning | None:
    """The rules of plans by the problem's course; None where the pipeline trains."""
    course = problem.regime.course
    return None if course is None else parts((course.mechanism,), "planning", "PLANNING", AbstractPlanning)[0]
