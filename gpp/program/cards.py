"""Proof that a program cannot hang on cards, before any process starts.

On a card the host issues operations on queues, and each queue runs them in the order of their issue. The nodes of a graph are
these operations and the waits of the hosts. A message is one node, which stands in a queue of either end: neither is over before
both have come to it. So is a sum, for all its members. Every node waits for all that its edges name:

* what stands before it in its queues;
* for the last wait of the host that issues it;
* a pass for the messages that it needs, a send and a sum for the passes before them, an update and a norm for the sums before;
* a wait of the host for the operations that it is about.

So the program runs to its end if and only if the graph has no cycle, whatever each operation takes. A `Path` says which queues
there are, and for what a host waits. `STRICTEST` allows one operation at a time on a card: what runs there is safe however little
the streams of a card overlap. Steps, evaluations and stretches follow each other without harm, if each of them is proved: every
message and sum of one has both ends in it, so nothing in it waits for what comes later.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final, final

from gpp.errors import MalformedProgram
from gpp.program.action import Action
from gpp.program.communicators import Communicator, communicators
from gpp.program.kinds import KINDS, Role
from gpp.program.program import Program, ReduceGroup, channel_of
from gpp.program.waits import EVERYONE, Channel


class Queues(Enum):
    """Which queues a card has."""

    ONE = "one"
    """A single one for everything: no two operations of a card overlap."""
    COMMUNICATORS = "communicators"
    """One for passes and updates, and one for each communicator that the card is in (`gpp.program.communicators`)."""
    CHANNELS = "channels"
    """One for passes and updates, one for each channel, and one for each set of devices that sum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Path:
    """How the host of a card turns its actions into operations.

    Args:
        queues: those of the card.
        pending: sends that may be under way when the host issues another one, else it waits for the oldest; None: any number.
        receives_wait: whether a receive waits for the passes that were issued before it.
        waits_for_all: whether the host waits, after each pass and each update, for all that it has issued.
    """

    queues: Queues
    pending: int | None = None
    receives_wait: bool = False
    waits_for_all: bool = False


OVERLAPPED: Final = Path(queues=Queues.COMMUNICATORS, pending=0)
"""The path of the runtime. With 0 sends under way the host waits most: what runs so runs with any number of them."""

STRICTEST: Final = Path(queues=Queues.ONE)

PATHS: Final = (OVERLAPPED, STRICTEST)
"""What every program must be able to run on."""


def check_cards(program: Program, groups: Sequence[ReduceGroup] = (), *, paths: Sequence[Path] = PATHS) -> None:
    """Prove that the program runs to its end on cards; `gpp.program.program.check_program` has proved the rest.

    Args:
        groups: the gradient groups of the plan.

    Raises:
        MalformedProgram: operations wait for each other in a circle, or the two ends of a connection disagree on the order of its
            messages; names them.
    """
    made = communicators(groups, program)
    for path in paths:
        _Operations(program, made, path).check()


_QUEUE, _HOST, _NEEDS, _ISSUED = range(4)
"""Why a node waits for another one: it stands behind it, its host waits for it first, it needs it, its host waits for it itself."""

_Meeting = tuple[object, ...]
"""What tells the messages and sums of one queue apart that wait for each other: who meets, but not for the how manieth time."""


@final
class _Operations:
    """The graph of a program on a path."""

    def __init__(self, program: Program, made: Sequence[Communicator], path: Path) -> None:
        self.program, self.path = program, path
        self.waits: list[list[int]] = []
        """By node, those that it waits for: 4 times the node, and why."""
        self.owner: list[tuple[int, int]] = []
        """By node, its device and the position of its action; of a host's wait, that of the action before, and its complement."""
        self._on = {pair: c.name for c in made for pair in c.pairs}
        self._sums = {group: c for c in made for group in c.groups}
        self._met: dict[_Meeting, list[int]] = defaultdict(list)
        self._labels: dict[int, tuple[Channel, int, int]] = {}
        self._ends: dict[int, int] = {}
        for device in sorted(program.actions):
            self._issue(device, program.actions[device])

    def check(self) -> None:
        """Find an order of all nodes.

        Raises:
            MalformedProgram: there is none.
        """
        if self._ends:
            node, count = min(self._ends.items())
            raise MalformedProgram(f"{self._text(node)} waits for ever: {count} of its ends never come")
        left = [len(waits) for waits in self.waits]
        users: list[list[int]] = [[] for _ in self.waits]
        for node, waits in enumerate(self.waits):
            for wait in waits:
                users[wait >> 2].append(node)
        ready = [node for node, count in enumerate(left) if not count]
        for node in ready:
            for user in users[node]:
                left[user] -= 1
                if not left[user]:
                    ready.append(user)
        if len(ready) < len(left):
            raise MalformedProgram(self._circle(left))

    def _node(self, device: int, position: int) -> int:
        self.waits.append([])
        self.owner.append((device, position))
        return len(self.owner) - 1

    def _meet(self, what: _Meeting, times: dict[_Meeting, int], ends: int, device: int, position: int) -> int:
        """The node of a device's next meeting of this kind, of so many ends."""
        nth = times[what]
        times[what] = nth + 1
        met = self._met[what]
        if nth == len(met):
            met.append(self._node(device, position))
            self._ends[met[nth]] = ends
        node = met[nth]
        self._ends[node] -= 1
        if not self._ends[node]:
            del self._ends[node]
        return node

    def _issue(self, device: int, actions: Sequence[Action]) -> None:
        """Add what the host of a device issues, in its order."""
        path, roles = self.path, _ROLES
        one, pending = path.queues is Queues.ONE, path.pending
        tails: dict[object, int] = {}
        """Queue -> its last operation. The queue of the passes is `device`."""
        times: dict[_Meeting, int] = defaultdict(int)
        posted: dict[tuple[str, int, int], list[int]] = defaultdict(list)
        sends: list[int] = []
        sums: list[int] = []
        updated = False
        host = -1
        for position, action in enumerate(actions):
            role, direction = roles[action.kind]
            needs: list[int] = []
            if role is Role.COMPUTE or role is Role.UPDATE:
                queue: object = device
                node = self._node(device, position)
                if role is Role.UPDATE:
                    needs, updated = sums, True
                else:
                    needs = posted.pop((direction, action.stage, action.microbatch), needs)
            elif role is Role.SUM:
                group = EVERYONE if KINDS[action.kind].everyone else action.microbatch
                found = self._sums[group]
                queue = device if one else found.name
                node = self._meet((found.name,), times, len(found.devices), device, position)
                self._same(node, (action.kind, group, -1, -1, -1), 0, 0)
                sums, updated = ([] if updated else sums), False
                needs = [tails[device]] if device in tails else []
                needs += sums if group == EVERYONE else []
                sums = [*sums, node]
            elif action.peer_device == device:
                continue  # handed over in memory
            else:
                channel = channel_of(action, device)
                on: object = channel if path.queues is Queues.CHANNELS else self._on[channel[3:]]
                queue = device if one else on
                if role is Role.SEND and pending is not None and len(sends) > pending:
                    host = self._wait(device, position - 1, host, sends[: len(sends) - pending])
                    del sends[: len(sends) - pending]
                node = self._meet((on, *channel[3:]), times, 2, device, position)
                self._same(node, channel, action.lo, action.hi)
                if role is Role.SEND:
                    sends.append(node)
                    needs = [tails[device]] if device in tails else []
                else:
                    posted[direction, action.stage, action.microbatch].append(node)
                    needs = [tails[device]] if path.receives_wait and device in tails else []
            waits = self.waits[node]
            waits += [4 * need + _NEEDS for need in needs]
            if queue in tails:
                waits.append(4 * tails[queue] + _QUEUE)
            if host >= 0:
                waits.append(4 * host + _HOST)
            tails[queue] = node
            if path.waits_for_all and queue == device and role in (Role.COMPUTE, Role.UPDATE):
                host = self._wait(device, position, host, tails.values())

    def _wait(self, device: int, position: int, host: int, about: Sequence[int]) -> int:
        node = self._node(device, -1 - position)
        self.waits[node] = [4 * other + _ISSUED for other in about]
        if host >= 0:
            self.waits[node].append(4 * host + _HOST)
        return node

    def _same(self, node: int, channel: Channel, lo: int, hi: int) -> None:
        """Note what an end of a meeting is about, which must be what the other ends are about.

        Raises:
            MalformedProgram: it is not; names both.
        """
        label = channel, lo, hi
        known = self._labels.setdefault(node, label)
        if known != label:
            device, position = self.owner[node]
            raise MalformedProgram(
                f"{self.program.actions[device][position].text(device)} would meet {_named(*label)} of another device: the ends of a "
                "connection disagree on the order of its operations"
            )

    def _text(self, node: int) -> str:
        """A node in words."""
        device, position = self.owner[node]
        if position < 0:
            return f"the wait of the host of device {device} after {self.program.actions[device][-1 - position].text(device)}"
        return self.program.actions[device][position].text(device)

    def _circle(self, left: Sequence[int]) -> str:
        """A circle among the nodes of which some wait is left."""
        node = next(node for node, count in enumerate(left) if count)
        seen: dict[int, int] = {}
        path: list[tuple[int, int, int]] = []
        while node not in seen:
            seen[node] = len(path)
            wait = next(wait for wait in self.waits[node] if left[wait >> 2])
            path.append((node, wait & 3, wait >> 2))
            node = wait >> 2
        words = [f"{self._text(a)} {_WHY[why]} {self._text(b)}" for a, why, b in path[seen[node] :]]
        shown = words if len(words) <= 2 * SHOWN else [*words[:SHOWN], f"({len(words) - 2 * SHOWN} more)", *words[-SHOWN:]]
        queues = {Queues.ONE: "one queue a card", Queues.COMMUNICATORS: "a queue for each communicator"}
        where = queues.get(self.path.queues, "a queue for each channel")
        return f"operations would wait for each other on cards, with {where}: " + "; ".join(shown)


def _named(channel: Channel, lo: int, hi: int) -> str:
    kind, src, dst, src_device, dst_device = channel
    if dst_device < 0:
        return f"{KINDS[kind].meaning} {src}"
    return f"{kind} s{src}.d{src_device} > s{dst}.d{dst_device} [{lo}:{hi}]"


SHOWN = 6
"""Waits of a long circle that are shown from its beginning, and from its end."""

_WHY: Final = ("stands behind", "is issued after", "needs", "is about")


class _Roles(dict[str, tuple[Role, str]]):
    """Role and direction of each kind; an unknown one is refused."""

    def __missing__(self, kind: str) -> tuple[Role, str]:
        row = KINDS[kind]
        self[kind] = row.role, row.direction
        return self[kind]


_ROLES: Final = _Roles()
