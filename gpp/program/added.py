"""The additions of mechanisms to the program of a plan: actions, the messages among them, and their proof."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from gpp.cluster import Cluster
from gpp.cost.stage import StageCost
from gpp.graph.op_graph import OpGraph
from gpp.mechanism import parts
from gpp.plan.plan import Plan
from gpp.program.channels import Channel
from gpp.program.kinds import Action, Direction, Resource
from gpp.program.program import Program, Task
from gpp.weights.base import AbstractWeights

Rates = Mapping[tuple[Direction, int, int], tuple[float, float]]
"""Direction, source and destination stage -> bytes for each sample, and bytes for each message."""


class AddedMessage(NamedTuple):
    """A message of a mechanism: both devices, what each does, and the direction of the pass that makes it."""

    made: Direction
    source: int
    send: Action
    destination: int
    receive: Action


class Return(NamedTuple):
    """Who sends gradients of a stage's inputs back: the device, the kind of its send, and the direction of the pass before it."""

    device: int
    kind: str
    made: Direction


class ActionShare(NamedTuple):
    """What a device makes of a pass, or sends of a message: of what grows with the samples, and of what does not."""

    of_samples: float = 1.0
    fixed: float = 1.0


WHOLE = ActionShare()


class CopyCost(NamedTuple):
    """The cost of one copy of a stage to the host, or back: seconds on its slowest device, bytes on each device; the same for the
    last micro-batch."""

    seconds: float
    num_bytes: float
    last_seconds: float
    last_num_bytes: float

    def of(self, *, last: bool) -> tuple[float, float]:
        """Seconds and bytes."""
        return (self.last_seconds, self.last_num_bytes) if last else (self.seconds, self.num_bytes)


CopyCosts = Mapping[tuple[Resource, int], CopyCost]
"""(Channel to or from the host, stage) -> the cost of its copies."""


class AbstractLowering(ABC):
    """A pass over the programs of plans whose stages have the mechanism's value.

    The plain program is a list of actions for each device. A mechanism gives back another one, in which actions of kinds of its own
    stand between those that are there (`lower`); or it says, before there is one, in which order devices have their passes
    (`orders`), what ends their mini-batches (`endings`), and which messages there are beside those of the edges (`messages`).
    """

    def check_stream(self, plan: Plan, graph: OpGraph, weights: AbstractWeights) -> None:
        """Refuse what the mechanism cannot be combined with in a pipeline that does not drain.

        Raises:
            InvalidPlan: names stage, field, value, rule and fix.
            InvalidConfig: the weight policy.
        """
        return None

    def orders(self, plan: Plan, graph: OpGraph, num_samples: int) -> dict[int, list[Task]] | None:
        """The passes of every device of a pipeline that does not drain; None: as the schedule has them."""
        return None

    def span(self, plan: Plan) -> int:
        """Micro-batches by which passes of one device may be apart; 0: as many as are in flight."""
        return 0

    def endings(
        self, plan: Plan, graph: OpGraph, num_samples: int, minibatches: int
    ) -> Mapping[int, Mapping[Task, Sequence[Action]]]:
        """Device -> the sums and updates that stand behind each of its passes; none: behind the last one of a mini-batch."""
        return {}

    def messages(self, plan: Plan, num_samples: int) -> Sequence[AddedMessage]:
        """The messages of passes, beside those of the edges."""
        return ()

    def returns(self, plan: Plan) -> Mapping[int, Sequence[Return]]:
        """Stage -> who sends the gradients of its inputs back, each a part of every sample, where others make some of them."""
        return {}

    def part(self, plan: Plan, device: int, action: Action) -> ActionShare:
        """The part of a pass that a device makes, or of a message that it sends."""
        return WHOLE

    def lower(self, plan: Plan, graph: OpGraph, program: Program) -> Program:
        """The program with the mechanism's actions. An evaluation, which has no updates, comes by here too."""
        return program

    @abstractmethod
    def due(self, plan: Plan, graph: OpGraph, program: Program) -> Mapping[int, Sequence[Action]]:
        """Device -> the actions of the mechanism's kinds, but for those of `messages`, in any order: what a program that was read
        from a file must hold."""

    def channels(self, plan: Plan) -> Sequence[Channel]:
        """The channels of the mechanism's messages between different devices, in one order on all devices."""
        return ()

    def rates(self, plan: Plan, graph: OpGraph) -> Rates:
        """The sizes of the mechanism's messages."""
        return {}

    def copies(self, plan: Plan, graph: OpGraph, cluster: Cluster, bills: Sequence[StageCost]) -> CopyCosts:
        """What its copies take; nothing of stages that have none.

        Raises:
            InvalidConfig: a device has no link to its host.
        """
        return {}

    def prove(self, plan: Plan, program: Program) -> None:
        """Prove the mechanism's own rules, which the graph of waits does not know.

        Raises:
            MalformedProgram: names the action.
        """
        return None


def lowerings(plan: Plan) -> list[AbstractLowering]:
    """The passes over a plan's programs: those of the mechanisms that its stages have, in the order of their names."""
    return parts(plan.mechanisms, "lowering", "LOWERING", AbstractLowering)


def part_of(added: Iterable[AbstractLowering], plan: Plan, device: int, action: Action) -> ActionShare:
    """The part of a pass that a device makes, or of a message that it sends, by all mechanisms of `lowerings`."""
    samples = fixed = 1.0
    for each in added:
        part = each.part(plan, device, action)
        samples, fixed = samples * part.of_samples, fixed * part.fixed
    return ActionShare(samples, fixed)


def ordered(plan: Plan, graph: OpGraph, num_samples: int) -> dict[int, list[Task]] | None:
    """The passes of every device, where a mechanism puts them in order; else None."""
    return next((found for part in lowerings(plan) if (found := part.orders(plan, graph, num_samples)) is not None), None)


def copy_costs(plan: Plan, graph: OpGraph, cluster: Cluster, bills: Sequence[StageCost]) -> CopyCosts:
    """What the copies of a plan's stages take, by all mechanisms.

    Raises:
        InvalidConfig: a device has no link to its host.
    """
    return {key: cost for part in lowerings(plan) for key, cost in part.copies(plan, graph, cluster, bills).items()}


def prove(plan: Plan, program: Program) -> None:
    """Prove what the mechanisms of a plan say of its program.

    Raises:
        MalformedProgram: names the action.
    """
    for part in lowerings(plan):
        part.prove(plan, program)
