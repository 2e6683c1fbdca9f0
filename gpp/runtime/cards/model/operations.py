"""Operations, the queues that hold them, and the clocks that tell which operation happens before which.

A clock has one component for each queue and each host: the number of its operations that are known to have happened.
Operation A happens before B if B's clock, when it runs, has reached A's index in the component of A's queue. That is a
fact of the program (events, meetings, waits of hosts), not of the order in which this run took the operations.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, final

if TYPE_CHECKING:
    from gpp.runtime.cards.model.hosts import AbstractHost
    from gpp.runtime.cards.model.meetings import Meeting
    from gpp.runtime.cards.model.memory import Memory

OPERATION_S = 1e-6
"""Seconds that every operation takes on the model's own clock."""


class Successor(Protocol):
    """Something that waits for operations; the last one that it misses calls `arrive`."""

    missing: int

    def arrive(self) -> None: ...


@final
class Op:
    """One operation in a queue.

    Args:
        name: what an error calls it.
        run: computes it; None for nothing.
        waits: operations of other queues, marked by `Queue.point`, that come first.
        meeting: what it is one end of.
        reads: memory that it reads.
        writes: memory that it writes.
    """

    __slots__ = (
        "clock",
        "done",
        "end_s",
        "index",
        "known",
        "meeting",
        "missing",
        "name",
        "queue",
        "reads",
        "run",
        "stamp",
        "successors",
        "waits",
        "wanted",
        "writes",
    )

    def __init__(
        self,
        queue: Queue,
        name: str,
        run: Callable[[], object] | None,
        waits: Sequence[Op],
        meeting: Meeting | None,
        reads: Sequence[Memory],
        writes: Sequence[Memory],
    ) -> None:
        self.queue, self.name, self.run, self.waits, self.meeting = queue, name, run, waits, meeting
        self.reads, self.writes = reads, writes
        self.index = self.missing = 0
        self.done = self.wanted = False
        self.clock: Sequence[int] = ()
        self.successors: list[Successor] = []
        self.end_s = 0.0
        host = queue.host
        host.stamp += 1
        # What the host knows when it queues the operation happens before it.
        self.stamp, self.known = host.stamp, host.known

    def arrive(self) -> None:
        """At the head of its queue, with nothing left to wait for but its partners."""
        meeting = self.meeting
        if meeting is None:
            self.queue.machine.ready.append(self)
        else:
            meeting.arrive(self)

    def advance(self) -> None:
        """Set the queue's clock to the moment of this operation."""
        queue = self.queue
        clock, end_s = queue.clock, queue.end_s
        clock[queue.id] = self.index
        if self.known is not queue.known:
            join(clock, self.known)
            queue.known = self.known
        clock[queue.host.id] = self.stamp
        for other in self.waits:
            join(clock, other.clock)
            if other.end_s > end_s:
                end_s = other.end_s
        self.end_s = queue.end_s = end_s + OPERATION_S

    def finish(self) -> None:
        """It is over: whoever waits for it goes on."""
        queue = self.queue
        if self.wanted:
            self.clock = tuple(queue.clock)
        self.done, self.run, self.waits, self.reads, self.writes, self.meeting = True, None, (), (), (), None
        queue.pending.popleft()
        successors, self.successors = self.successors, []
        for successor in successors:
            successor.missing -= 1
            if not successor.missing:
                successor.arrive()

    def __str__(self) -> str:
        return f"{self.name} (number {self.index} on {self.queue})"


@final
class Queue:
    """A stream: its operations run one by one, in the order in which its host has queued them."""

    __slots__ = ("clock", "count", "end_s", "host", "id", "known", "machine", "name", "pending", "tail")

    def __init__(self, host: AbstractHost, name: str, number: int) -> None:
        self.host, self.machine, self.name, self.id = host, host.machine, name, number
        self.clock: list[int] = []
        self.known: Sequence[int] = ()
        self.count, self.end_s = 0, 0.0
        self.tail: Op | None = None
        self.pending: deque[Op] = deque()

    def point(self) -> Op | None:
        """The operation that is queued last, as something to wait for; None on a stream that was never used."""
        tail = self.tail
        if tail is not None and not tail.wanted:
            tail.wanted = True
            if tail.done:
                tail.clock = tuple(self.clock)
        return tail

    def __str__(self) -> str:
        return f"{self.name} of {self.host.name}"


def join(clock: list[int], other: Sequence[int]) -> None:
    """Add to a clock what another one knows; the other may be shorter."""
    length = len(other)
    if length == len(clock):
        clock[:] = map(max, clock, other)
    else:
        clock[:length] = map(max, clock[:length], other)
