"""A row of the table of kinds (`gpp.program.kinds`): what an action of one kind does, occupies and waits for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Final, NamedTuple

from gpp.cost.stage import StageCost
from gpp.routing import Direction


class Resource(Enum):
    """The thing that an action occupies while it runs. The next action on it waits until it is free."""

    DEVICE = "device"
    CHANNEL = "channel"
    """The channel of a message: direction, both stages, both devices."""
    MEMBERS = "members"
    """The devices of all members of a sum. Each waits until all have come to it."""
    COPY_OUT = "copy out"
    """The device's channel to the host. It runs beside the device, and beside the channel back."""
    COPY_IN = "copy in"
    """The device's channel from the host."""
    NOTHING = "nothing"
    """The action is over at once."""


class Role(Enum):
    """The way in which an action is carried out: who runs it, what takes its time, and which messages belong to it."""

    COMPUTE = "compute"
    """A pass of a stage: waits for the messages whose receives were posted for it, and makes the messages of its direction."""
    SEND = "send"
    """One end of a message: waits for the pass that makes it, and for nobody after."""
    RECEIVE = "receive"
    """The other end: it is posted, and the pass that needs the message waits for it."""
    SUM = "sum"
    """A sum of gradients over devices."""
    UPDATE = "update"
    """A step of the optimizer."""
    COPY = "copy"
    """Bytes of a micro-batch on their way to the host or back. Begins when its device comes to it, which goes on meanwhile."""


class Need(NamedTuple):
    """An action of the same stage and device that must come first.

    Args:
        kind: text of the kind. A copy is needed only in a stage that has copies, and there by every micro-batch.
        previous: whether the micro-batch before it, in the order of the device, must have had the action; else its own must.
    """

    kind: str
    previous: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A row of the table.

    Args:
        text: the letters of the kind, in programs and in events.
        meaning: words for readers of traces and reports.
        role: the way in which such an action is carried out.
        copies: of a copy, the channel that it goes over.
        needs: what it waits for, beside what its role says of messages; of a send, the pass that makes the message, where that is
            not the one of its direction.
        needed_by: kinds of the core that wait for it, where it is a mechanism's: each as in `needs`, told from the other end.
        direction: the direction of a message, or of a pass that takes and makes messages; "" for kinds without messages.
        holds: whether the stage holds a micro-batch's activations after this pass.
        frees: whether the stage frees them after this pass.
        returns: whether this pass makes the gradients of the stage's inputs.
        finishes: whether a micro-batch's weight gradients are complete after this pass.
        everyone: whether the members of a sum are all devices; else those of the gradient group that the action names.
        instead_of: the kind of the core in whose place such an action stands, together with one of each other kind of the mechanism
            that says the same: all passes of a stage are whole, or all are in these parts.
        seconds: of a mechanism's pass, by the bill of its stage and for the last micro-batch or another; of one that several
            devices make together, of all of it. None: the bill says (`StageCost.own_s`).
        of_minibatch: whether an action's number counts mini-batches, as an update's does, and not micro-batches of its stage.
    """

    text: str
    meaning: str
    role: Role
    copies: Resource | None = None
    needs: tuple[Need, ...] = ()
    needed_by: tuple[Need, ...] = ()
    direction: Direction = ""
    holds: bool = False
    frees: bool = False
    returns: bool = False
    finishes: bool = False
    everyone: bool = False
    instead_of: str = ""
    seconds: Callable[[StageCost, bool], float] | None = None
    of_minibatch: bool = False

    @property
    def occupies(self) -> Resource:
        """The resource that such an action occupies."""
        return self.copies or _OCCUPIED[self.role]

    @property
    def computes(self) -> bool:
        return self.role is Role.COMPUTE

    @property
    def transfers(self) -> bool:
        """Whether an action of this kind sends or receives, and so names a peer and samples."""
        return self.role in (Role.SEND, Role.RECEIVE)


_OCCUPIED: Final = {
    Role.COMPUTE: Resource.DEVICE,
    Role.SEND: Resource.CHANNEL,
    Role.RECEIVE: Resource.NOTHING,
    Role.SUM: Resource.MEMBERS,
    Role.UPDATE: Resource.DEVICE,
}
