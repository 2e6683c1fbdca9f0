"""All cards of a run and their hosts in one process: what may run, what runs next, and when nothing can.

The hosts queue operations and go on; the machine runs operations at the heads of the queues while the hosts wait, in an
order that a policy and a seed decide. No order is a matter of luck for the checks: races and early reuse are judged by
clocks (`operations.py` beside this), deadlocks by there being nothing left to run.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Literal, final

from tests.support.cards.faults import Deadlock, Mismatch
from tests.support.cards.hosts import AbstractHost, GeneratorHost, Program, ThreadHost, Wait
from tests.support.cards.meetings import Group
from tests.support.cards.memory import use
from tests.support.cards.operations import Op, Queue

Rule = Literal["streams", "one_queue"]
Policy = Literal["random", "eager", "lazy"]

TURN = 32
"""Operations that a host queues on average under `random` before others may go first."""


@final
class Machine:
    """Runs the hosts and their operations.

    Args:
        rule: `streams`: each stream progresses by itself. `one_queue`, the strictest: a card runs one operation at a
            time over all its streams, in the order in which its host has queued them.
        policy: `eager`: an operation runs as soon as it may; `lazy`: only when no host can go on; `random`: by the seed.
        seed: of the order among what may run.
    """

    def __init__(self, *, rule: Rule = "streams", policy: Policy = "random", seed: int = 0) -> None:
        self.one_queue, self.policy = rule == "one_queue", policy
        self.rule = rule
        self.hosts: list[AbstractHost] = []
        self.runnable: list[AbstractHost] = []
        self.asking: list[AbstractHost] = []
        """Hosts that go on when any operation has run."""
        self.ready: list[Op] = []
        """One operation of each queue head or meeting that may run."""
        self.failure: BaseException | None = None
        self.findings: list[str] = []
        """What is no fault by itself, and no good: device-wide waits while communicators have work."""
        self.communicators = self.connections = self.executed = 0
        self._random = random.Random(seed)
        self._queues: list[Queue] = []
        self._gatherings: list[tuple[tuple[tuple[int, ...], str], dict[int, Wait], Group]] = []
        self._gathered: dict[int, int] = {}
        self._turn = TURN

    def new_queue(self, host: AbstractHost, name: str) -> Queue:
        """A stream of a host, with a component in every clock."""
        queue = Queue(host, name, len(self._queues), self.ready)
        self._queues.append(queue)
        for one in (*self._queues, *self.hosts, host):
            one.clock.extend([0] * (len(self._queues) - len(one.clock)))
        return queue

    def generator(self, program: Program) -> GeneratorHost:
        """Add a worker whose program is a generator."""
        host = GeneratorHost(self, len(self.hosts), program)
        self.hosts.append(host)
        self.runnable.append(host)
        return host

    def thread(self, program: Callable[[], object]) -> ThreadHost:
        """Add a worker whose program runs in a thread."""
        host = ThreadHost(self, len(self.hosts), program)
        self.hosts.append(host)
        self.runnable.append(host)
        return host

    def gather(self, host: AbstractHost, ranks: Sequence[int], name: str) -> tuple[Group, Wait | None]:
        """Make a communicator: a meeting of all hosts.

        Returns:
            The communicator, and what the host waits for.

        Raises:
            Mismatch: another host makes another communicator at this point.
        """
        number = self._gathered[host.rank] = self._gathered.get(host.rank, -1) + 1
        key = (tuple(ranks), name)
        if number == len(self._gatherings):
            self._gatherings.append((key, {}, Group(self, ranks, name)))
        wanted, waits, group = self._gatherings[number]
        if wanted != key:
            other = self.hosts[next(iter(waits))]
            raise Mismatch(
                f"{host.name} makes communicator {name} of {key[0]} as its number {number}, but {other.name} makes "
                f"{wanted[1]} of {wanted[0]} as its number {number}: they must be made in one order"
            )
        wait = waits[host.rank] = host.meet(f"all workers, to make communicator {name} (number {number})")
        if host.rank in group.ranks:
            group.join(host)
        if len(waits) == len(self.hosts):
            self.communicators += 1
            for one in waits.values():
                one.release()
        return group, wait if wait.missing else None

    def turn_is_over(self) -> bool:
        """Whether a host that has queued an operation lets others go first."""
        if self.policy == "lazy":
            return False
        if self.policy == "eager":
            return bool(self.ready)
        self._turn -= 1
        if self._turn:
            return False
        self._turn = self._random.randint(1, 2 * TURN)
        return True

    def run(self) -> None:
        """Run all hosts to their ends, and all that they have queued.

        Raises:
            Fault: what the model finds.
        """
        try:
            while self.failure is None and (self.runnable or self.ready):
                self._next()
            if self.failure is None and (stuck := self._stuck()):
                self.failure = Deadlock(stuck)
        except Exception as error:  # of a check, or of a kernel: the hosts end first
            self.failure = error
        if self.failure is not None:
            for host in self.hosts:
                if isinstance(host, ThreadHost):
                    host.stop()
            raise self.failure

    def _next(self) -> None:
        ready, runnable = self.ready, self.runnable
        if self.policy == "lazy":
            host_first = bool(runnable)
        elif self.policy == "eager":
            host_first = not ready
        else:
            host_first = self._random.random() * (len(ready) + len(runnable)) >= len(ready)
        if host_first:
            runnable.pop(self._pick(len(runnable))).resume()
        else:
            self.execute(ready.pop(0 if self.policy == "eager" else self._pick(len(ready))))
            if self.asking:
                runnable += self.asking
                self.asking.clear()

    def _pick(self, count: int) -> int:
        return int(self._random.random() * count) if count > 1 else 0

    def execute(self, op: Op) -> None:
        """Run an operation that may run, with its partners if it is one end of a meeting."""
        meeting = op.meeting
        if meeting is None:
            self.executed += 1
            op.advance()
            if op.reads or op.writes:
                use(op)
            if op.run is not None:
                op.run()
            op.finish()
            return
        ops = meeting.spread()
        self.executed += len(ops)
        for one in ops:
            if one.reads or one.writes:
                use(one)
        if meeting.run is not None:
            meeting.run(meeting.payloads)
        for one in ops:
            one.finish()

    def _stuck(self) -> str:
        """What nobody can go on with; empty if everything is over."""
        lines = []
        for host in self.hosts:
            if not host.ended:
                text = host.waiting.text if host.waiting else "its turn"
                lines.append(f"{host.name} waits for {text} at {host.place()}")
            heads = [queue.pending[0] for queue in (*host.queues, *host.communicators) if queue.pending]
            if self.one_queue and heads:
                heads = [min(heads, key=lambda op: op.number)]
            lines += [f"  {_head(op)}" for op in heads]
        if not lines:
            return ""
        return "\n".join([f"nothing can go on (rule {self.rule}):", *lines])


def _head(op: Op) -> str:
    """An operation that cannot run, and why."""
    queue = op.queue
    more = f", {len(queue.pending) - 1} more behind it" if len(queue.pending) > 1 else ""
    if op.meeting is None:
        waits = [str(other) for other in op.waits if not other.done]
        return f"{queue} stands at {op.name}" + (f", which waits for {', '.join(waits)}" if waits else "") + more
    partners = [one for one in op.meeting.ops.values() if one is not op]
    if len(partners) + 1 < op.meeting.size:
        why = "its partner has not been queued"
    else:
        why = "; ".join(f"{one} is not at the head" for one in partners if one.missing)
    return f"{queue} stands at {op.name} ({why}){more}"
