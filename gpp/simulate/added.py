"""Plans whose steps a mechanism predicts itself, because no simulation of their program would say what a step takes."""

from __future__ import annotations

from abc import ABC, abstractmethod

from gpp.cost.problem import Problem
from gpp.mechanism import parts
from gpp.plan.plan import Plan
from gpp.timeline import Timeline


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
