"""Proof that a program cannot hang on cards, before any process starts.

The host of a card issues operations on queues, and each queue runs them in the order of their issue. The nodes of a graph are these
operations and the waits of the hosts. A message is one node, which stands in a queue of either end: it is over when both have come
to it. A sum is one node, too, for all its members. An edge says that a node waits for another one:

* an operation waits for the one before it in its queue, and for the last wait of the host that issued it;
* a pass waits for the messages that it needs;
* a send and a sum wait for the passes before them;
* an update and a norm wait for the sums before them;
* a wait of the host waits for the operations that it is about.

Copies to the host and back are left out: one waits for what its own card has issued before it, and so does whatever needs it, with
or without it. So the program runs to its end if and only if the graph has no cycle, however long each operation takes. A `Path`
says which queues there are, and what a host waits for.

What runs on the `STRICTEST` path, where a card does one operation at a time, runs on every path on which a card waits only for what
it has issued before: each of its waits is one that the single queue has, too. So it needs no two streams of a card to progress side
by side. Steps, evaluations and stretches that are proved may follow each other: both ends of a message, and all members of a sum,
lie in one of them, so nothing waits for what comes later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final, final

import numpy as np

from gpp.errors import MalformedProgram
from gpp.plan.plan import Plan
from gpp.program.action import Action
from gpp.program.channels import Channel
from gpp.program.communicators import Communicator, communicators
from gpp.program.global_order import check_any_length
from gpp.program.kinds import KINDS, Role
from gpp.program.program import Program, ReduceGroup, channel_of
from gpp.program.waits import EVERYONE


class Queues(Enum):
    """Which queues a card has."""

    ONE = "one"
    """The card has one queue for everything: no two of its operations overlap."""
    COMMUNICATORS = "communicators"
    """One for passes and updates, and one for each communicator that the card is in (`gpp.program.communicators`)."""
    CHANNELS = "channels"
    """One for passes and updates, one for each channel, and one for each set of devices that sum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Path:
    """The way in which the host of a card turns its actions into operations.

    Args:
        queues: the queues of the card.
        pending: sends that may be under way when the host issues another one, else it waits for the oldest; None: any number.
        receives_wait: whether a receive waits for the passes that were issued before it.
        waits_for_all: whether the host waits, after each pass and each update, for all that it has issued.
    """

    queues: Queues
    pending: int | None = None
    receives_wait: bool = False
    waits_for_all: bool = False


OVERLAPPED: Final = Path(queues=Queues.COMMUNICATORS, pending=0)
"""The path of the runtime. The host waits most if no other send may be under way: what runs so runs with any number of them."""

STRICTEST: Final = Path(queues=Queues.ONE)

PATHS: Final = (STRICTEST,)
"""Every program must run on these paths. What runs there runs on the runtime's path too, which only overlaps more."""


def check_cards(
    program: Program,
    plan: Plan,
    groups: Sequence[ReduceGroup] = (),
    *,
    paths: Sequence[Path] = PATHS,
    made: Sequence[Communicator] | None = None,
) -> None:
    """Prove that the program runs to its end on cards; `gpp.program.program.check_program` has proved the rest.

    Of a pipeline that does not drain, stretches of every length are proved.

    Args:
        groups: the gradient groups of the plan.
        made: the communicators; None for those of this program alone (`gpp.program.communicators.communicators`).

    Raises:
        MalformedProgram: operations wait for each other in a circle, or the two ends of a connection disagree on the order of its
            messages; names them.
    """
    made = communicators(groups, program) if made is None else made
    for path in paths:
        _Operations(program, plan, made, path).check()
        if program.minibatches > 1 and path.queues is Queues.ONE:
            check_any_length(program, plan)


_QUEUE, _HOST, _NEEDS, _ISSUED = range(4)
"""Why a node waits for another: place in a queue, the host's order, a need, or the host's own wait for it."""

_About = tuple[Channel, int, int]
"""Channel and samples of a message. Of a sum, its kind and group in place of a channel."""


@final
class _Line:
    """Operations that meet. There are no tags, so the n-th that one end issues meets the n-th of every other end."""

    __slots__ = ("about", "came", "nodes")

    def __init__(self, ends: Sequence[int]) -> None:
        self.nodes: list[int] = []
        self.about: list[_About] = []
        self.came: dict[int, int] = dict.fromkeys(ends, 0)
        """Device -> how many operations it has issued."""


@final
class _Operations:
    """The graph of a program on a path."""

    def __init__(self, program: Program, plan: Plan, made: Sequence[Communicator], path: Path) -> None:
        self.program, self.path = program, path
        self.owner: list[tuple[int, int]] = []
        """By node, its device and the position of its action; of a host's wait, -1 less the position of the action before it."""
        self.waiting: list[int] = []
        self.waits: list[int] = []
        """For each edge, the node that waits, and 4 times the one that it waits for, and why."""
        self._on = {pair: c.name for c in made for pair in c.pairs}
        self._sums = {group: c for c in made for group in c.groups}
        self._lines: dict[tuple[object, ...], _Line] = {}
        self._teams = {
            (s, device): replica
            for s, stage in enumerate(plan.stages)
            if stage.devices_per_replica > 1
            for replica in stage.replicas
            for device in replica
        }
        """(stage, device) -> the devices that share the replica: they add up tensors in the midst of each pass."""
        for device in sorted(program.actions):
            self._issue(device, program.actions[device])

    def check(self) -> None:
        """Find an order in which all nodes can run.

        Raises:
            MalformedProgram: there is none.
        """
        for line in self._lines.values():
            least = min(line.came.values())
            if least < len(line.nodes):
                device = next(device for device, came in line.came.items() if came == least)
                raise MalformedProgram(f"{self._text(line.nodes[least])} waits for ever: device {device} never comes to it")
        waits = np.array(self.waits, dtype=np.int64) >> 2
        waiting = np.array(self.waiting, dtype=np.int64)
        users = waiting[np.argsort(waits, kind="stable")].tolist()
        begin = np.concatenate(([0], np.cumsum(np.bincount(waits, minlength=len(self.owner))))).tolist()
        left = np.bincount(waiting, minlength=len(self.owner)).tolist()
        ready = [node for node, count in enumerate(left) if not count]
        for node in ready:
            for user in users[begin[node] : begin[node + 1]]:
                left[user] -= 1
                if not left[user]:
                    ready.append(user)
        if len(ready) < len(left):
            raise MalformedProgram(self._circle(left))

    def _issue(self, device: int, actions: Sequence[Action]) -> None:
        """Add the operations that the host of a device issues, in its order."""
        path, one = self.path, self.path.queues is Queues.ONE
        owner, waiting, waits = self.owner, self.waiting, self.waits
        tails: dict[object, int] = {}
        """Queue -> its last operation. The queue of the passes is `device`."""
        lines: dict[tuple[str, int, int, int], tuple[object, Channel, _Line]] = {}
        posted: dict[tuple[str, int, int], list[int]] = {}
        sends: list[int] = []
        sums: list[int] = []
        updated, host = False, -1
        for position, action in enumerate(actions):
            kind, stage, microbatch, peer_stage, peer_device, lo, hi = action
            role, direction = _ROLES[kind]
            if role is Role.COPY:
                continue
            needs: Sequence[int] = ()
            queue: object = device
            if role is _SEND or role is _RECEIVE:
                if peer_device == device:
                    continue  # handed over in memory
                where = kind, stage, peer_stage, peer_device
                if where not in lines:
                    lines[where] = self._connection(channel_of(action, device))
                queue, channel, line = lines[where]
                if role is _SEND:
                    if path.pending is not None and len(sends) > path.pending:
                        old = len(sends) - path.pending
                        host = self._wait(device, position - 1, host, sends[:old])
                        del sends[:old]
                    node = self._meet(line, device, position, (channel, lo, hi))
                    sends.append(node)
                else:
                    node = self._meet(line, device, position, (channel, lo, hi))
                    posted.setdefault((direction, stage, microbatch), []).append(node)
                if (role is _SEND or path.receives_wait) and device in tails and not one:
                    needs = (tails[device],)
                queue = device if one else queue
            elif role is Role.SUM:
                sums, updated = ([] if updated else sums), False
                group = EVERYONE if KINDS[kind].everyone else microbatch
                node, queue = self._sum(device, position, kind, group)
                needs = [tails[device]] if device in tails else []
                needs = [*needs, *sums] if group == EVERYONE else needs
                sums = [*sums, node]
            else:
                if role is Role.COMPUTE and (stage, device) in self._teams:
                    node = self._pass(device, position, self._teams[stage, device], (kind, stage, microbatch))
                else:
                    node = len(owner)
                    owner.append((device, position))
                needs, updated = (sums, True) if role is Role.UPDATE else (posted.pop((direction, stage, microbatch), ()), updated)
            for need in needs:
                waiting.append(node)
                waits.append(4 * need + _NEEDS)
            if queue in tails:
                waiting.append(node)
                waits.append(4 * tails[queue] + _QUEUE)
            if host >= 0:
                waiting.append(node)
                waits.append(4 * host + _HOST)
            tails[queue] = node
            if path.waits_for_all and role in (Role.COMPUTE, Role.UPDATE):
                host = self._wait(device, position, host, list(tails.values()))

    def _connection(self, channel: Channel) -> tuple[object, Channel, _Line]:
        """The queue of a channel's messages, and the line of operations that meet on it."""
        pair = channel[3:]
        on: object = channel if self.path.queues is Queues.CHANNELS else self._on[pair]
        return on, channel, self._lines.setdefault((on, pair), _Line(pair))

    def _sum(self, device: int, position: int, kind: str, group: int) -> tuple[int, object]:
        """The node of a device's next sum of a group, and its queue."""
        found = self._sums[group]
        line = self._lines.setdefault((found.name, found.devices), _Line(found.devices))
        node = self._meet(line, device, position, ((kind, group, -1, -1, -1), 0, 0))
        return node, device if self.path.queues is Queues.ONE else found.name

    def _pass(self, device: int, position: int, team: tuple[int, ...], what: tuple[str, int, int]) -> int:
        """The node of a pass in which several devices meet. They share one node."""
        kind, stage, microbatch = what
        line = self._lines.setdefault(("pass", team), _Line(team))
        return self._meet(line, device, position, ((kind, stage, -1, -1, -1), microbatch, 0))

    def _meet(self, line: _Line, device: int, position: int, about: _About) -> int:
        """The node of a device's next operation in a line.

        Raises:
            MalformedProgram: the other ends have something else there; names both.
        """
        nth = line.came[device]
        line.came[device] = nth + 1
        if nth == len(line.nodes):
            line.nodes.append(len(self.owner))
            line.about.append(about)
            self.owner.append((device, position))
        elif line.about[nth] != about:
            own, other = self.program.actions[device][position].text(device), self._text(line.nodes[nth])
            raise MalformedProgram(f"{own} would meet {other}: the ends of a connection disagree on the order of its operations")
        return line.nodes[nth]

    def _wait(self, device: int, position: int, host: int, about: Sequence[int]) -> int:
        """A wait of the host of a device."""
        node = len(self.owner)
        self.owner.append((device, -1 - position))
        self.waiting += [node] * len(about)
        self.waits += [4 * other + _ISSUED for other in about]
        if host >= 0:
            self.waiting.append(node)
            self.waits.append(4 * host + _HOST)
        return node

    def _text(self, node: int) -> str:
        """The words for a node in a message."""
        device, position = self.owner[node]
        if position < 0:
            return f"the wait of the host of device {device} after {self.program.actions[device][-1 - position].text(device)}"
        return self.program.actions[device][position].text(device)

    def _circle(self, left: Sequence[int]) -> str:
        """A circle of nodes that wait for each other."""
        node = next(node for node, count in enumerate(left) if count)
        through = {user: wait for user, wait in zip(self.waiting, self.waits, strict=True) if left[wait >> 2]}
        seen: dict[int, int] = {}
        path: list[tuple[int, int, int]] = []
        while node not in seen:
            seen[node] = len(path)
            wait = through[node]
            path.append((node, wait & 3, wait >> 2))
            node = wait >> 2
        words = [f"{self._text(a)} {_WHY[why]} {self._text(b)}" for a, why, b in path[seen[node] :]]
        shown = words if len(words) <= 2 * SHOWN else [*words[:SHOWN], f"({len(words) - 2 * SHOWN} more)", *words[-SHOWN:]]
        queues = {Queues.ONE: "one queue a card", Queues.COMMUNICATORS: "a queue for each communicator"}
        where = queues.get(self.path.queues, "a queue for each channel")
        return f"operations would wait for each other on cards, with {where}: " + "; ".join(shown)


SHOWN = 6
"""Waits of a long circle that are shown from its beginning, and from its end."""

_WHY: Final = ("stands behind", "is issued after", "needs", "is about")


class _Roles(dict[str, tuple[Role, str]]):
    """The role and direction of each kind. An unknown kind is refused."""

    def __missing__(self, kind: str) -> tuple[Role, str]:
        row = KINDS[kind]
        self[kind] = row.role, row.direction
        return self[kind]


_ROLES: Final = _Roles()
_SEND, _RECEIVE = Role.SEND, Role.RECEIVE
