"""Hosts: the programs that queue operations, one a worker, as threads or as generators.

Only one of them runs at a time, until it waits or ends: a run of the model is the same each time for one seed.
"""

from __future__ import annotations

import sys
import threading
import traceback
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, final

from tests.support.cards.faults import Fault
from tests.support.cards.memory import Free
from tests.support.cards.operations import Memory, Op, Queue, join

if TYPE_CHECKING:
    from tests.support.cards.machine import Machine

PATIENCE = 1000
"""Questions in vain after which a host that asks for nothing else waits until an operation has run."""
LEAVE_S = 10.0
"""Seconds that a host has, after a failure, to get to its next call."""
_HERE = str(Path(__file__).parent)


@final
class Wait:
    """What a host waits for: operations, or other hosts.

    Args:
        kind: for counting.
        text: what an error calls it.
    """

    def __init__(self, host: AbstractHost, kind: str, text: str, ops: Iterable[Op] = (), *, meets: bool = False) -> None:
        self.host, self.kind, self.text = host, kind, text
        self.ops = tuple(ops)
        self.missing = int(meets)
        for op in self.ops:
            if not op.done:
                op.successors.append(self)
                self.missing += 1

    def release(self) -> None:
        """The other hosts have come."""
        self.missing = 0
        self.arrive()

    def arrive(self) -> None:
        """Let the host go on, if it waits already."""
        if self.host.waiting is self:
            self.host.machine.runnable.append(self.host)


Program = Callable[["AbstractHost"], Generator["Wait | None", None, object]]
"""A host's program that yields what it waits for."""


class AbstractHost(ABC):
    """One worker's program, and the streams of its card.

    Args:
        rank: its number among all workers.
    """

    def __init__(self, machine: Machine, rank: int) -> None:
        self.machine, self.rank, self.name = machine, rank, f"worker {rank}"
        self.queues: list[Queue] = []
        self.communicators: list[Queue] = []
        self.launched = 0
        self.clock: list[int] = []
        self.known: Sequence[int] = ()
        self.waits: Counter[str] = Counter()
        """How often it waited, by kind; waits for what was over already count too."""
        self.waiting: Wait | None = None
        self.ended = False
        self.live_bytes = self.peak_bytes = 0
        self._tail: Op | None = None

    @abstractmethod
    def resume(self) -> None:
        """Run until it waits, pauses or ends."""

    @abstractmethod
    def place(self) -> str:
        """Where its program stands."""

    def queue(self, name: str, *, communicator: bool = False) -> Queue:
        """A new stream."""
        queue = self.machine.new_queue(self, name)
        (self.communicators if communicator else self.queues).append(queue)
        return queue

    def launch(
        self,
        queue: Queue,
        name: str,
        *,
        run: Callable[[], object] | None = None,
        reads: Sequence[Memory] = (),
        writes: Sequence[Memory] = (),
    ) -> Op:
        """Queue an operation."""
        op = Op(queue, name, run, (), None, reads, writes)
        self.queued(op)
        return op

    def queued(self, op: Op) -> None:
        """Put an operation at the end of its queue."""
        self.launched += 1
        op.number = self.launched
        queue = op.queue
        before = self._tail if self.machine.one_queue else queue.tail
        if before is not None and not before.done:
            before.successors.append(op)
            op.missing = 1
        for other in op.waits:
            if not other.done:
                other.successors.append(op)
                op.missing += 1
        queue.count += 1
        op.index = queue.count
        queue.tail = self._tail = op
        queue.pending.append(op)
        for memory in op.reads:
            memory.used.add(queue)
        for memory in op.writes:
            memory.used.add(queue)
        if not op.missing:
            op.arrive()

    def order(self, queue: Queue, op: Op | None, name: str = "wait for an event") -> None:
        """Make a stream wait for an operation that `Queue.point` or a communicator has given."""
        if op is not None and op.queue is not queue:
            self.queued(Op(queue, f"{name} ({op.name})", None, (op,), None, (), ()))

    def until(self, ops: Iterable[Op | None], kind: str, text: str = "") -> Wait:
        """What to wait for until operations are over that `Queue.point` or a communicator has given."""
        self.waits[kind] += 1
        return Wait(self, kind, text or kind, [op for op in ops if op is not None])

    def everything(self, kind: str = "device-wide wait") -> Wait:
        """What to wait for until all that is queued on the card is over, communication included."""
        left = [op for queue in self.communicators for op in queue.pending]
        if left:
            names = ", ".join(str(op) for op in left[:4])
            self.machine.findings.append(f"{kind} of {self.name} while {len(left)} operations of communicators are queued: {names}")
        return self.until([queue.point() for queue in (*self.queues, *self.communicators)], kind)

    def meet(self, text: str) -> Wait:
        """What to wait for until other hosts have come to the same place; the last of them releases it."""
        self.waits["meeting"] += 1
        return Wait(self, "meeting", text, meets=True)

    def learn(self, ops: Iterable[Op]) -> None:
        """The host has seen that operations are over."""
        clock = self.clock
        for op in ops:
            if clock[op.queue.id] < op.index:
                join(clock, op.clock)
                self.known = ()
        if not self.known:
            self.known = tuple(clock)

    def saw(self, op: Op) -> bool:
        """Whether an operation is over that `Queue.point` or a communicator has given; the host then knows it."""
        if op.done:
            self.learn((op,))
        return op.done

    def allocate(self, queue: Queue) -> None:
        """Memory is about to be made for a stream: what went back to it may be handed out now.

        Raises:
            EarlyReuse: another stream may still use some of that.
        """
        released, queue.released = queue.released, []
        for memory in released:
            if len(memory.used) > 1 or (memory.used and queue not in memory.used):
                Free(memory, self)

    def made(self, memory: Memory) -> None:
        """Count memory that was made."""
        self.live_bytes += memory.num_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def release(self, memory: Memory) -> None:
        """The last reference to some memory has gone, at any time and in any thread: it goes back to its stream."""
        if memory.queue is not None:
            self.live_bytes -= memory.num_bytes
            memory.queue.released.append(memory)


@final
class GeneratorHost(AbstractHost):
    """A host whose program yields each wait (`until`, `everything`, `Group.connect`, `Machine.gather`) or None.

    Args:
        program: called with the host.
    """

    def __init__(self, machine: Machine, rank: int, program: Program) -> None:
        super().__init__(machine, rank)
        self._program = program(self)

    def resume(self) -> None:
        wait, self.waiting = self.waiting, None
        if wait is not None:
            self.learn(wait.ops)
        for wait in self._program:
            if wait is None:
                continue
            if wait.missing:
                self.waiting = wait
                return
            self.learn(wait.ops)
        self.ended = True

    def place(self) -> str:
        frame = getattr(self._program, "gi_frame", None)
        return "ended" if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


@final
class ThreadHost(AbstractHost):
    """A host whose program runs in a thread of its own and calls `wait`.

    Args:
        program: called without arguments.
    """

    def __init__(self, machine: Machine, rank: int, program: Callable[[], object]) -> None:
        super().__init__(machine, rank)
        self._program = program
        self._go, self._stopped = threading.Semaphore(0), threading.Semaphore(0)
        self._thread: threading.Thread | None = None
        self._asked = 0
        """How often it has asked in vain whether something is over since it has queued an operation."""
        self.result: object = None
        self.error: BaseException | None = None
        self.switched: tuple[Callable[[], None], Callable[[], None]] | None = None
        """Called when the host goes on, and when it stops."""

    def saw(self, op: Op) -> bool:
        """As for any host; one that does nothing but ask waits until something happens."""
        if not op.done:
            self.check()
            self._asked += 1
            if self._asked > PATIENCE:
                self.waiting = Wait(self, "", f"{op}, for which it asks again and again")
                self.machine.asking.append(self)
                self._stop()
                self.waiting = None
        return super().saw(op)

    def stop(self) -> None:
        """End it after a failure of the machine; a thread that waits for something else is left behind."""
        if self._thread is None:
            self.ended = True
        while not self.ended:
            self._go.release()
            if not self._stopped.acquire(timeout=LEAVE_S):
                return

    def resume(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._main, name=self.name, daemon=True)
            self._thread.start()
        else:
            self._go.release()
        self._stopped.acquire()
        if self.ended:
            self._thread.join()

    def _main(self) -> None:
        try:
            self.result = self._program()
        except BaseException as error:  # whatever ends a worker ends the machine, which raises it again
            self.error = error
            if self.machine.failure is None:
                self.machine.failure = error
        self.ended = True
        self._stopped.release()

    def wait(self, wait: Wait | None) -> None:
        """Wait; the machine runs other things meanwhile.

        Raises:
            Fault: the machine has failed.
        """
        self.check()
        if wait is None:
            return
        if wait.missing:
            self.waiting = wait
            self._stop()
            self.waiting = None
        self.learn(wait.ops)

    def pause(self) -> None:
        """Let others go first."""
        self.machine.runnable.append(self)
        self._stop()

    def _stop(self) -> None:
        if self.switched:
            self.switched[1]()
        self._stopped.release()
        self._go.acquire()
        if self.switched:
            self.switched[0]()
        self.check()

    def check(self) -> None:
        """End this host if the machine has failed.

        Raises:
            Fault: a copy of the failure.
        """
        failure = self.machine.failure
        if failure is not None:
            raise type(failure)(*failure.args) if isinstance(failure, Fault) else Fault(f"another worker failed: {failure!r}")

    def queued(self, op: Op) -> None:
        self.check()
        self._asked = 0
        super().queued(op)
        if self.machine.turn_is_over():
            self.pause()

    def place(self) -> str:
        if self._thread is None or self._thread.ident is None:
            return "not started"
        frame = sys._current_frames().get(self._thread.ident)
        if frame is None:
            return "ended"
        outside = [
            one for one in traceback.extract_stack(frame) if not one.filename.startswith(_HERE) and "/torch/" not in one.filename
        ]
        own = [one for one in outside if Path(one.filename).name != "threading.py"]
        return " < ".join(f"{Path(one.filename).name}:{one.lineno} {one.name}" for one in reversed(own[-3:]))
