"""A strategy's choice of a mechanism: it says which stages of a planner's plan get the mechanism's value."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from gpp.cost.problem import Problem
from gpp.cost.regime import AbstractMessages
from gpp.plan.plan import Plan


class AbstractChoice(ABC):
    """The settings of a mechanism, an entry of `strategy.mechanisms`; its fields are what a user can set."""

    package: ClassVar[str]
    """The package of the mechanism (`gpp.mechanism`), which workers import too."""

    @property
    def messages(self) -> AbstractMessages | None:
        """The form of messages that planners reckon with, of `strategy.edges` alone; None: tensors travel as they are."""
        return None

    def check(self, *, trains: bool) -> None:
        """Refuse the settings where a model is trained, or where nothing is.

        Raises:
            InvalidConfig: names the setting.
        """
        return None

    @abstractmethod
    def chosen(self, plan: Plan, problem: Problem) -> Plan:
        """The plan with the mechanism's value on the stages that get one.

        Every candidate of a search comes by here before it is judged, so the bill of a value counts in the choice of the plan.

        Raises:
            Infeasible: the plan cannot have it.
        """
