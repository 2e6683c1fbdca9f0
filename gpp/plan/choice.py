"""A strategy's choice of a mechanism: it says which stages of a planner's plan get the mechanism's value."""

from __future__ import annotations

from abc import ABC, abstractmethod
from difflib import get_close_matches
from typing import ClassVar

from gpp.cost.problem import Problem
from gpp.cost.regime import AbstractMessages
from gpp.errors import InvalidConfig
from gpp.mechanism import found
from gpp.plan.plan import Plan

SPLIT = "split"
"""The word of `strategy.replicas` under which each replica has a part in every micro-batch."""


class AbstractChoice(ABC):
    """The settings of a mechanism, an entry of `strategy.mechanisms`; its fields are what a user can set."""

    package: ClassVar[str]
    """The package of the mechanism (`gpp.mechanism`), which workers import too."""

    @property
    def messages(self) -> AbstractMessages | None:
        """The form of messages that planners count with; only `strategy.edges` has one. None: tensors travel as they are."""
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


class AbstractSharing:
    """What replicas do with the micro-batches of their stage, under the mechanism's name in `strategy.replicas`: each splits all,
    unless its own class says otherwise."""

    def check(self, problem: Problem, size: int | None) -> None:
        """Refuse a problem in which no plan could have it, before a search.

        Args:
            size: samples of a micro-batch, where they are imposed.

        Raises:
            InvalidConfig: names the setting.
        """
        return None

    def chosen(self, plan: Plan, problem: Problem) -> Plan:
        """The plan with the mechanism's value on the stages that get one; its explanation says which do not."""
        return plan


def sharing(replicas: str) -> AbstractSharing:
    """What a word of `strategy.replicas` means.

    Raises:
        InvalidConfig: no mechanism has that name.
    """
    if replicas == SPLIT:
        return AbstractSharing()
    known = found("sharing", "SHARING", AbstractSharing)
    if replicas not in known:
        words = [SPLIT, *known]
        near = next(iter(get_close_matches(replicas, words, n=1, cutoff=0.5)), SPLIT)
        raise InvalidConfig("strategy.replicas", replicas, f"must be {' or '.join(words)}", f"set strategy.replicas={near}")
    return known[replicas]
