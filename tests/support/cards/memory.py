"""Who uses which memory, and whether events order the uses: races, and memory that is handed out again too early."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, final

from tests.support.cards.faults import EarlyReuse, Race
from tests.support.cards.operations import Memory, Op, join

if TYPE_CHECKING:
    from tests.support.cards.hosts import AbstractHost


def use(op: Op) -> None:
    """Check an operation against all that used its memory before it ran, and note its own use.

    Raises:
        Race: no event orders it and another one, and one of the two writes.
        EarlyReuse: the memory had been handed back.
    """
    queue = op.queue
    clock = queue.clock
    for memories, writes in ((op.reads, False), (op.writes, True)):
        for memory in memories:
            memory.touched.setdefault(queue, [None, None])[0 if writes else 1] = op
            if len(memory.touched) > 1 or memory.freed:
                _check(op, memory, clock, writes=writes)


def _check(op: Op, memory: Memory, clock: list[int], *, writes: bool) -> None:
    own = op.queue
    for queue, (write, read) in memory.touched.items():
        if queue is own:
            continue
        other = write if write is not None and clock[queue.id] < write.index else None
        if other is None and writes and read is not None and clock[queue.id] < read.index:
            other = read
        if other is not None and other is memory.before:
            raise Race(
                f"{op} uses {memory}, which {queue} may still use for what it held before, up to {other.name}, and no event "
                f"orders the two: {own} does not wait for an event recorded on {queue} since the memory was made"
            )
        if other is not None:
            uses = [(other, other is write), (op, writes)]
            if other.queue.host is own.host and other.number > op.number:
                uses.reverse()
            (first, wrote), (second, writes) = uses
            raise Race(
                f"{first} {'writes to' if wrote else 'reads'} {memory}, {second} {'writes to' if writes else 'reads'} it, and "
                f"no event orders the two: {second.queue} does not wait for an event recorded on {first.queue} after {first.name}"
            )
    if memory.freed:
        raise EarlyReuse(f"{op} uses {memory}, {memory.freed}, and nothing orders the use before that")


def use_on_host(host: AbstractHost, memory: Memory, *, writes: bool) -> None:
    """The host itself reads or writes pinned memory, now.

    Raises:
        Race: an operation on a card may still use it.
    """
    for queue in memory.used:
        write, read = memory.touched.get(queue, (None, None))
        last = [op for op in (write, read if writes else None) if op is not None]
        left = [op for op in queue.pending if memory in op.writes or (writes and memory in op.reads)]
        for op in (*last, *left):
            if op.index > host.clock[queue.id]:
                verb = "writes to" if writes else "reads"
                raise Race(f"{host.name} {verb} {memory} while {op} may still use it; wait for an event after it first")


@final
class Free:
    """Memory that went back to its stream is handed out again: later operations of the stream may write to it.

    Every use on another stream must happen before the end of what its own stream holds now, or before the end of what
    the streams of `keep` hold now, or be known to the host.
    """

    def __init__(self, memory: Memory, host: AbstractHost) -> None:
        assert memory.queue is not None
        self.memory, self.host, self.known = memory, host, host.known
        points = [queue.point() for queue in (memory.queue, *memory.kept)]
        self.points = [op for op in points if op is not None]
        self.missing = 0
        for op in self.points:
            if not op.done:
                op.successors.append(self)
                self.missing += 1
        if not self.missing:
            self.arrive()

    def arrive(self) -> None:
        """All that it is ordered behind is over: check the uses.

        Raises:
            EarlyReuse: a use on another stream is not.
        """
        memory, owner = self.memory, self.memory.queue
        clock = self._clock()
        for queue in memory.used:
            if queue is owner:
                continue
            for op in memory.touched.get(queue, ()):
                if op is not None and op.index > clock[queue.id]:
                    raise EarlyReuse(
                        f"{memory} went back to {owner} and is handed out again while {op} may still use it: record an event "
                        f"after {op.name} and make {owner} wait for it before the last reference goes, or call keep(tensor, "
                        f"{queue.name})"
                    )
        memory.freed = f"which went back to {owner} and was handed out again"

    def _clock(self) -> Sequence[int]:
        clock = [0] * len(self.host.clock)
        join(clock, self.known)
        for op in self.points:
            join(clock, op.clock)
        return clock
