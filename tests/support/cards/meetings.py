"""Communicators: messages and sums are meetings of operations at the heads of their members' queues.

A message happens before what follows its receive. It does not order what follows the send behind what precedes the
receive: a library may send a small message before its receiver comes, so no program may rely on that.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from tests.support.cards.faults import Misuse
from tests.support.cards.hosts import AbstractHost, Wait
from tests.support.cards.operations import Meeting, Memory, Op, Queue

if TYPE_CHECKING:
    from tests.support.cards.machine import Machine


@final
@dataclass(frozen=True, slots=True)
class Part:
    """What a member brings to a meeting: its memory, and what `run` is called with for all members."""

    memory: Memory
    payload: object
    run: Callable[[dict[int, object]], object]


@final
class Group:
    """A communicator: one queue for each member, one operation at a time.

    Args:
        ranks: the members, by the numbers of their hosts.
        name: what an error calls it.
    """

    def __init__(self, machine: Machine, ranks: Sequence[int], name: str) -> None:
        self.machine, self.ranks, self.name = machine, tuple(sorted(ranks)), name
        self.queues: dict[int, Queue] = {}
        self._messages: dict[tuple[int, int], list[Meeting]] = defaultdict(list)
        self._sums: list[Meeting] = []
        self._issued: dict[object, int] = defaultdict(int)
        self._met: dict[object, dict[int, Wait]] = defaultdict(dict)

    def join(self, host: AbstractHost) -> None:
        """Make the member's queue."""
        self.queues[host.rank] = host.queue(f"communicator {self.name}", communicator=True)

    def connect(self, host: AbstractHost, peer: int | None = None) -> Wait | None:
        """What the host waits for before its first message with `peer`, or its first sum (None).

        Raises:
            Misuse: the peer is no member, or the worker itself.
        """
        if peer is not None and (peer not in self.queues or peer == host.rank):
            raise Misuse(f"worker {host.rank} exchanges a message with {peer} on {self.name}, whose members are {self.ranks}")
        key = None if peer is None else (min(host.rank, peer), max(host.rank, peer))
        met = self._met[key]
        if host.rank in met:
            return None
        size = len(self.ranks) if key is None else 2
        what = "sum" if key is None else f"message between {key[0]} and {key[1]}"
        wait = met[host.rank] = host.meet(f"the first {what} on communicator {self.name}")
        if len(met) == size:
            self.machine.connections += key is not None
            for one in met.values():
                one.release()
        return wait if wait.missing else None

    def send(
        self, host: AbstractHost, peer: int, size: object = None, *, after: Queue | None = None, part: Part | None = None
    ) -> Op:
        """Queue a send behind what is on the queue `after`.

        Args:
            size: must equal that of the receive.
            part: the memory that is sent, and what moves it.
        """
        meeting, text = self._message(host.rank, peer, "send", host.rank, peer)
        meeting.agree(host.rank, f"{text} on communicator {self.name} is", size)
        return self._launch(host, text, after, meeting, 0, part, writes=False)

    def receive(
        self, host: AbstractHost, peer: int, size: object = None, *, after: Queue | None = None, part: Part | None = None
    ) -> Op:
        """Queue a receive behind what is on the queue `after`."""
        meeting, text = self._message(peer, host.rank, "receive", host.rank, peer)
        meeting.agree(host.rank, f"{text} on communicator {self.name} is", size)
        return self._launch(host, text, after, meeting, 1, part, writes=True)

    def sum(self, host: AbstractHost, size: object = None, *, after: Queue | None = None, part: Part | None = None) -> Op:
        """Queue this member's part of a sum."""
        number = self._issued[host.rank]
        self._issued[host.rank] += 1
        text = f"sum {number}"
        if number == len(self._sums):
            self._sums.append(Meeting(self.machine.ready, f"{text} on communicator {self.name}", len(self.ranks), one_way=False))
        meeting = self._sums[number]
        meeting.agree(host.rank, f"worker {host.rank} takes part in {meeting.name} with a size", size)
        return self._launch(host, text, after, meeting, host.rank, part, writes=True)

    def _message(self, source: int, target: int, kind: str, rank: int, peer: int) -> tuple[Meeting, str]:
        key = (source, target)
        number = self._issued[key, kind]
        self._issued[key, kind] += 1
        meetings = self._messages[key]
        if number == len(meetings):
            name = f"message {number} from {source} to {target} on communicator {self.name}"
            meetings.append(Meeting(self.machine.ready, name, 2, one_way=True))
        way = f"to worker {peer}" if kind == "send" else f"from worker {peer}"
        return meetings[number], f"{kind} {number} {way}"

    def _launch(
        self, host: AbstractHost, text: str, after: Queue | None, meeting: Meeting, place: int, part: Part | None, *, writes: bool
    ) -> Op:
        point = after.point() if after else None
        waits = () if point is None else (point,)
        own = () if part is None else (part.memory,)
        op = Op(self.queues[host.rank], text, None, waits, meeting, () if writes else own, own if writes else ())
        op.wanted = True
        meeting.ops[place] = op
        if part is not None:
            meeting.payloads[place], meeting.run = part.payload, part.run
        host.queued(op)
        return op
