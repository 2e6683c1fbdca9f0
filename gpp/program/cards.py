"""Proof that a program cannot hang on cards, before any process starts.

The host of a card issues operations on queues, and each queue runs them in the order of their issue. The proof takes a card to have
one queue, so that no two of its operations overlap. The nodes of a graph are these operations. A message is one node, which stands
in the queue of either end: it is over when both have come to it. A sum is one node, too, for all its members, and so is a pass that
several devices share. Each node waits for the one before it in each queue that it stands in. What else it needs, such as the
messages of a pass, has been issued before it on its own card, and so stands before it in the queue.

Copies to the host and back are left out: a copy waits only for earlier operations of its card, and what needs the copy waits for
those anyway. So the program runs to its end if and only if the graph has no cycle, however long each operation takes.

The runtime overlaps more: it has a queue for each communicator, and its waits are some of the single queue's. So what runs in
one queue runs there, and needs no two streams of a card to progress side by side (`tests.checks.cards` compares both with a model
of cards). Steps, evaluations and stretches that are proved may follow each other: both ends of a message, and all members of a
sum, lie in one of them, so nothing waits for what comes later.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import numpy as np

from gpp.errors import MalformedProgram
from gpp.plan.plan import Plan
from gpp.program.channels import Channel
from gpp.program.communicators import communicators
from gpp.program.global_order import check_any_length
from gpp.program.kinds import KINDS, Action, Role
from gpp.program.program import Program, ReduceGroup, channel_of
from gpp.program.waits import EVERYONE


def check_cards(program: Program, plan: Plan, groups: Sequence[ReduceGroup] = ()) -> None:
    """Prove that the program runs to its end on cards; `gpp.program.program.check_program` has proved the rest.

    Of a pipeline that does not drain, stretches of every length are proved.

    Args:
        groups: the gradient groups of the plan.

    Raises:
        MalformedProgram: operations wait for each other in a circle, or the two ends of a connection disagree on the order of its
            messages; names them.
    """
    _Operations(program, plan, groups).check()
    if program.minibatches > 1:
        check_any_length(program, plan)


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
    """The graph of a program."""

    def __init__(self, program: Program, plan: Plan, groups: Sequence[ReduceGroup]) -> None:
        self.program = program
        self.owner: list[tuple[int, int]] = []
        """By node, its device and the position of its action."""
        self.waiting: list[int] = []
        self.waits: list[int] = []
        """For each edge, the node that waits, and the one that it waits for."""
        self._sums = {group: c for c in communicators(groups, program) for group in c.groups}
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
        waits, waiting = np.array(self.waits, dtype=np.int64), np.array(self.waiting, dtype=np.int64)
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
        before = -1
        for position, action in enumerate(actions):
            kind, stage, microbatch, _, peer_device, lo, hi = action
            role = KINDS[kind].role
            if role is Role.COPY or peer_device == device:
                continue  # what a device sends itself is handed over in memory
            if role is Role.SEND or role is Role.RECEIVE:
                channel = channel_of(action, device)
                node = self._meet(channel[3:], channel[3:], device, position, (channel, lo, hi))
            elif role is Role.SUM:
                group = EVERYONE if KINDS[kind].everyone else microbatch
                on = self._sums[group]
                node = self._meet((on.name, on.devices), on.devices, device, position, ((kind, group, -1, -1, -1), 0, 0))
            elif role is Role.COMPUTE and (team := self._teams.get((stage, device))):
                # The devices that share a pass share its node.
                node = self._meet(("pass", team), team, device, position, ((kind, stage, -1, -1, -1), microbatch, 0))
            else:
                node = len(self.owner)
                self.owner.append((device, position))
            if before >= 0:
                self.waiting.append(node)
                self.waits.append(before)
            before = node

    def _meet(self, where: tuple[object, ...], ends: tuple[int, ...], device: int, position: int, about: _About) -> int:
        """The node of a device's next operation with the other ends of a line.

        Raises:
            MalformedProgram: the other ends have something else there; names both.
        """
        if (line := self._lines.get(where)) is None:
            line = self._lines[where] = _Line(ends)
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

    def _text(self, node: int) -> str:
        """The words for a node in a message."""
        device, position = self.owner[node]
        return self.program.actions[device][position].text(device)

    def _circle(self, left: Sequence[int]) -> str:
        """A circle of nodes that wait for each other."""
        node = next(node for node, count in enumerate(left) if count)
        through = {user: wait for user, wait in zip(self.waiting, self.waits, strict=True) if left[wait]}
        seen: dict[int, int] = {}
        path = list[int]()
        while node not in seen:
            seen[node] = len(path)
            path.append(node)
            node = through[node]
        words = [f"{self._text(node)} stands behind {self._text(through[node])}" for node in path[seen[node] :]]
        shown = words if len(words) <= 2 * SHOWN else [*words[:SHOWN], f"({len(words) - 2 * SHOWN} more)", *words[-SHOWN:]]
        return "operations would wait for each other on cards, with one queue a card: " + "; ".join(shown)


SHOWN = 6
"""Waits of a long circle that are shown from its beginning, and from its end."""
