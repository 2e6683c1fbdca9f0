"""What mechanisms add to the program of a plan: actions, the messages among them, and their proof."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from gpp.graph.op_graph import OpGraph
from gpp.mechanism import found
from gpp.plan.plan import Plan
from gpp.program.action import Action
from gpp.program.channels import Channel
from gpp.program.kinds import Direction
from gpp.program.program import Program

Rates = Mapping[tuple[Direction, int, int], tuple[float, float]]
"""Direction, source and destination stage -> bytes for each sample, and bytes for each message."""


class AbstractLowering(ABC):
    """A pass over the programs of plans whose stages have the mechanism's value.

    The plain program is a list of actions for each device. A mechanism gives back another one, in which actions of kinds of its own
    stand between those that are there.
    """

    @abstractmethod
    def lower(self, plan: Plan, graph: OpGraph, program: Program) -> Program:
        """The program with the mechanism's actions. An evaluation, which has no updates, comes by here too."""

    @abstractmethod
    def due(self, plan: Plan, graph: OpGraph, program: Program) -> Mapping[int, Sequence[Action]]:
        """Device -> the actions that `lower` adds, in any order: what a program that was read from a file must hold."""

    def channels(self, plan: Plan) -> Sequence[Channel]:
        """The channels of the mechanism's messages between different devices, in one order on all devices."""
        return ()

    def rates(self, plan: Plan, graph: OpGraph) -> Rates:
        """The sizes of its messages."""
        return {}

    def prove(self, plan: Plan, program: Program) -> None:
        """Prove what must hold beside the graph of waits.

        Raises:
            MalformedProgram: names the action.
        """
        return None


def lowerings(plan: Plan) -> list[AbstractLowering]:
    """The passes over a plan's programs: those of the mechanisms that its stages have, in the order of their names."""
    names = {value.name for stage in plan.stages for value in stage.mechanisms}
    return [part for name, part in found("lowering", "LOWERING", AbstractLowering).items() if name in names] if names else []


def prove(plan: Plan, program: Program) -> None:
    """Prove what the mechanisms of a plan say of its program.

    Raises:
        MalformedProgram: names the action.
    """
    for part in lowerings(plan):
        part.prove(plan, program)
