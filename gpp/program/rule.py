"""The rules of mechanisms for the actions of one device, beside the waits that their kinds say."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from gpp.mechanism import parts
from gpp.program.action import Action
from gpp.program.kinds import OWNERS


class AbstractRule(ABC):
    """A rule for programs that have kinds of the mechanism, whatever their plan."""

    @abstractmethod
    def check(self, device: int, actions: Sequence[Action]) -> None:
        """Prove the rule for a device that has such actions.

        Raises:
            MalformedProgram: names the action.
        """


def check_rules(device: int, actions: Sequence[Action]) -> None:
    """Prove the rules of those mechanisms whose kinds a device's actions have.

    Raises:
        MalformedProgram: names the action.
    """
    names = {OWNERS[kind] for kind in {action.kind for action in actions} & OWNERS.keys()}
    for rule in parts(names, "rule", "RULE", AbstractRule):
        rule.check(device, actions)
