"""Operations, the queues that hold them, and the clocks that tell which operation happens before which.

A clock has one component for each queue: the number of its operations that are known to have happened.
Operation A happens before B if B's clock, when it runs, has reached A's index in the component of A's queue. That is a
fact of the program (events, meetings, waits of hosts), not of the order in which this run took the operations.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, final

from tests.support.cards.faults import Mismatch

if TYPE_CHECKING:
    from tests.support.cards.hosts import AbstractHost

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
        self.number = 0
        """Among all that its host has queued."""
        # What the host knows when it queues the operation happens before it.
        self.known = queue.host.known

    def arrive(self) -> None:
        """At the head of its queue, with nothing left to wait for but its partners."""
        meeting = self.meeting
        if meeting is None:
            self.queue.ready.append(self)
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
    """A stream: its operations run one by one, in the order in which its host has queued them.

    Args:
        number: its component in every clock.
        ready: gets the operations that may run.
    """

    def __init__(self, host: AbstractHost, name: str, number: int, ready: list[Op]) -> None:
        self.host, self.name, self.id, self.ready = host, name, number, ready
        self.clock: list[int] = []
        self.known: Sequence[int] = ()
        self.count, self.end_s = 0, 0.0
        self.tail: Op | None = None
        self.pending: deque[Op] = deque()
        self.released: list[Memory] = []
        """Memory of the stream without references, which the next memory made for it may be."""

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


@final
class Memory:
    """A block of memory: of a card, or pinned memory of a host.

    Args:
        queue: the stream to which it belongs; None for pinned memory.
        name: the operation that it was made for.
        num_bytes: its size.
    """

    def __init__(self, queue: Queue | None, name: str, num_bytes: int) -> None:
        self.queue, self.name, self.num_bytes = queue, name, num_bytes
        self.used: set[Queue] = set()
        """Streams for which an operation on it was queued."""
        self.kept: set[Queue] = set()
        self.touched: dict[Queue, list[Op | None]] = {}
        """Stream -> its last operation that wrote to it and its last that read it, of those that ran."""
        self.freed: str | None = None
        # Its stream may still be busy for whoever had the memory before, with all that it holds now.
        self.before = None if queue is None else queue.tail
        if queue is not None and self.before is not None:
            self.touched[queue] = [self.before, None]

    def __str__(self) -> str:
        return f"the memory of {self.name} ({self.num_bytes} bytes)"


@final
class Meeting:
    """Operations of several queues that happen as one, when all are at the heads of their queues.

    Args:
        ready: gets one of them when all are at the heads.
        name: what an error calls it.
        size: how many they are.
        one_way: the first member's past becomes the second's, and not the other way round.
    """

    def __init__(self, ready: list[Op], name: str, size: int, *, one_way: bool) -> None:
        self.ready, self.name, self.size, self.one_way = ready, name, size, one_way
        self.arrived = 0
        self.ops: dict[int, Op] = {}
        self.sizes: dict[int, object] = {}
        self.payloads: dict[int, object] = {}
        self.run: Callable[[dict[int, object]], object] | None = None
        """Called with what each member has brought."""

    def arrive(self, op: Op) -> None:
        self.arrived += 1
        if self.arrived == self.size:
            self.ready.append(op)

    def agree(self, rank: int, text: str, size: object) -> None:
        """Note the size with which a member comes.

        Raises:
            Mismatch: another member comes with another size.
        """
        for other, known in self.sizes.items():
            if known != size:
                raise Mismatch(f"{text} of {size}, but worker {other} takes part in {self.name} with {known}")
        self.sizes[rank] = size

    def spread(self) -> list[Op]:
        """The operations, in the order of ranks, with the clocks that the meeting leaves behind."""
        ops = [op for _, op in sorted(self.ops.items())]
        for op in ops:
            op.advance()
        if self.one_way:
            source, target = self.ops[0].queue, self.ops[1].queue
            join(target.clock, source.clock)
        else:
            for op in ops[1:]:
                join(ops[0].queue.clock, op.queue.clock)
            for op in ops[1:]:
                join(op.queue.clock, ops[0].queue.clock)
        end_s = max(op.end_s for op in ops)
        for op in ops:
            op.end_s = op.queue.end_s = end_s
        return ops


def join(clock: list[int], other: Sequence[int]) -> None:
    """Add to a clock what another one knows; the other may be shorter."""
    length = len(other)
    if length == len(clock):
        clock[:] = map(max, clock, other)
    else:
        clock[:length] = map(max, clock[:length], other)
