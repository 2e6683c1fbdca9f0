"""Messages between devices: the contract, and torch.distributed.

One ordered channel for each (direction, stage edge, device pair): first-in first-out on every transport, so all of them
run the same program and forks and joins cannot cross. `cards.py` beside this moves messages between cards.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, final

import torch
import torch.distributed as dist

from gpp.graph.op_graph import OpGraph
from gpp.plan.plan import Plan
from gpp.program.added import lowerings
from gpp.program.channels import Channel
from gpp.program.kinds import BACKWARD, FORWARD
from gpp.program.program import reduce_groups, teams
from gpp.program.waits import EVERYONE
from gpp.runtime.transport.form import Form
from gpp.runtime.transport.shared_memory import SPIN_S, RingBuffer, RingSize, SharedMemory, available, place


@final
class TimedSend:
    """A message under way, which a thread waits for."""

    def __init__(self, work: dist.Work, num_bytes: int) -> None:
        self.work, self.num_bytes, self.begun_s = work, num_bytes, time.perf_counter()
        self.left = threading.Event()
        self.error: BaseException | None = None

    def is_completed(self) -> bool:
        return self.left.is_set()

    def wait(self) -> None:
        """Wait until the message has left; raises what the backend has raised."""
        self.left.wait()
        if self.error is not None:
            raise self.error


@final
class SendTimer:
    """The messages of one channel."""

    def __init__(self) -> None:
        self._seen: queue.SimpleQueue[tuple[int, float]] = queue.SimpleQueue()
        self._under_way: queue.SimpleQueue[TimedSend] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def note(self, num_bytes: int, seconds: float) -> None:
        """A message has left."""
        self._seen.put((num_bytes, seconds))

    def take(self) -> list[tuple[int, float]]:
        """Bytes and seconds of the messages that have left since the last call."""
        return [self._seen.get() for _ in range(self._seen.qsize())]

    def follow(self, work: dist.Work, num_bytes: int) -> TimedSend:
        """Time a message that has just been begun."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._wait, daemon=True)
            self._thread.start()
        sent = TimedSend(work, num_bytes)
        self._under_way.put(sent)
        return sent

    def _wait(self) -> None:
        before_s = 0.0
        while True:
            sent = self._under_way.get()
            try:
                sent.work.wait()
                now_s = time.perf_counter()
                self.note(sent.num_bytes, now_s - max(sent.begun_s, before_s))
                before_s = now_s
            except BaseException as error:  # the worker's own thread raises it where it waits
                sent.error = error
            sent.left.set()


Mark = Any
"""A point in time, as the clock of the device has it: seconds of `time.perf_counter`, or an event on a card."""


class Handle(Protocol):
    """A sum under way."""

    def wait(self) -> object:
        """Let what is computed from now on find its result."""


Receive = Callable[[], torch.Tensor]
"""A receive under way: lets what is computed from now on find the message, and returns it."""


class Done:
    """A handle of what is over."""

    def wait(self) -> None:
        return None


DONE = Done()


class AbstractTransport(ABC):
    """Point-to-point messages and sums between the devices of a plan.

    `finished` says when the send or sum begun last is over: for the clock of the device, not for waiting. `idle`, set
    before `prepare`, is called where a transport is about to wait for a message that has not come.
    """

    finished: Callable[[], Mark]
    idle: Callable[[], None] | None = None

    @abstractmethod
    def prepare(self, sizes: Mapping[Channel, RingSize]) -> None:
        """Make room; called on every device before any message, and again, while none is under way, where some are to be larger.

        Args:
            sizes: of all channels that this device sends or receives on.
        """

    @abstractmethod
    def post(self, channel: Channel, form: Form) -> Receive:
        """Start to receive the channel's next message, which has this form."""

    def lend(self, allowed: bool) -> None:
        """Whether a message may stay where the transport has it; otherwise it gets memory of its own, which the allocator sees."""
        return None

    def timed(self, channel: Channel) -> list[tuple[int, float]]:
        """Bytes, and seconds that the link took, of the messages that have left on a channel since the last call.

        Whoever sends on such a channel begins to call it before the first message; a transport may know nothing of its links.
        """
        return []

    def room(self, channel: Channel, form: Form) -> torch.Tensor | None:
        """The buffer for the next message of a channel, to be given to `send` at once; None: send any tensor."""
        return None

    @final
    def buffer(self, channel: Channel, form: Form) -> torch.Tensor:
        """A buffer for the next message of a channel: `room`, or memory of its own."""
        found = self.room(channel, form)
        return form.empty() if found is None else found

    @abstractmethod
    def send(self, channel: Channel, tensor: torch.Tensor) -> None:
        """Start to send a contiguous tensor; it must not be written to until `flush`."""

    @abstractmethod
    def reduce(self, group: int, tensor: torch.Tensor) -> Handle:
        """Start to sum `tensor` in place over the devices of gradient group number `group`, or over all (`EVERYONE`).

        It must not be read or written until the handle has been waited on.
        """

    def scatter(self, group: int, parts: Sequence[torch.Tensor], own: int) -> Handle:
        """Start to sum part number r of a contiguous tensor on the r-th device of a gradient group, for each r.

        What a device has of the others' parts may be anything afterwards. Here they are summed as well.

        Args:
            own: number of this device in the group.
        """
        for part in parts:
            self.reduce(group, part).wait()
        return DONE

    def hand_out(self, group: int, parts: Sequence[torch.Tensor], own: int) -> Handle:
        """Start to give all devices of a gradient group part number r as its r-th device has it, for each r.

        Here all of them are summed, with zeros in place of the others' parts.
        """
        for number, part in enumerate(parts):
            if number != own:
                part.zero_()
        return self.scatter(group, parts, own)

    @abstractmethod
    def sum_members(self, devices: tuple[int, ...], tensor: torch.Tensor) -> Handle:
        """Start to sum a contiguous `tensor` in place over the devices of one replica (`gpp.program.program.teams`).

        Passes do so in their midst; all members call it in one order. It must not be read or written until the handle has been
        waited on.
        """

    @abstractmethod
    def flush(self, limit: int = 0) -> None:
        """Wait until at most `limit` sends are under way."""

    def close(self) -> None:
        """Give back what is held for messages; called once on every device, after the last message of all of them."""
        return None


def channels_of(plan: Plan) -> tuple[Channel, ...]:
    """Every channel that a plan may use, in one order on all devices."""
    out = []
    for s, t in plan.edges:
        for a in plan.stages[s].devices:
            for b in plan.stages[t].devices:
                if a != b:
                    out += [(FORWARD, s, t, a, b), (BACKWARD, t, s, b, a)]
    for part in lowerings(plan):
        out += part.channels(plan)
    return tuple(out)


@final
class TorchTransport(AbstractTransport):
    """torch.distributed with gloo, which tells channels apart by tag.

    Messages between processes of one machine go through shared memory (`shared_memory.py` beside this) if they may.
    All others go to the process groups directly: the checks of `torch.distributed.isend` cost more than its call.
    """

    def __init__(
        self,
        plan: Plan,
        graph: OpGraph,
        *,
        device: int,
        rank_of: dict[int, int],
        shared_memory: bool = True,
        timeout_s: float = 600.0,
    ) -> None:
        self._device, self._rank_of, self._timeout_s = device, rank_of, timeout_s
        self._shares = shared_memory and available()
        self._tag = {channel: tag for tag, channel in enumerate(channels_of(plan)) if device in channel[3:]}
        world = dist.distributed_c10d._get_default_group()
        self._route: dict[Channel, tuple[dist.ProcessGroup, int]] = {
            channel: (world, rank_of[channel[4] if device == channel[3] else channel[3]]) for channel in self._tag
        }
        self._reduce: list[Any] = [dist.new_group([rank_of[d] for d in group.devices]) for group in reduce_groups(plan, graph)]
        made = {devices: dist.new_group([rank_of[d] for d in devices]) for devices in teams(plan)}
        self._teams = {devices: group for devices, group in made.items() if device in devices}
        self._pending: deque[tuple[dist.Work | TimedSend, torch.Tensor]] = deque()
        self._timed: dict[Channel, SendTimer] = {}
        self._memory: SharedMemory | None = None
        self._incoming: dict[Channel, int] = {}
        self._outgoing: dict[Channel, RingBuffer] = {}

    def prepare(self, sizes: Mapping[Channel, RingSize]) -> None:
        if not self._shares:
            return
        own = {self._tag[channel]: size for channel, size in sizes.items() if channel[4] == self._device}
        before, memory = self._memory, SharedMemory(own, self._timeout_s)
        places = _gather([*place(), os.getpid(), memory.descriptor])
        me, near = places[dist.get_rank()], set[Channel]()
        if sum(other[0] == me[0] for other in places) <= len(os.sched_getaffinity(0)):
            memory.spin_s = SPIN_S
        memory.idle = self.idle
        reached = 1
        for channel in sizes:
            peer = places[self._rank_of[channel[3] if channel[4] == self._device else channel[4]]]
            if peer[:2] == me[:2]:
                near.add(channel)
        for device in sorted({channel[4] for channel in near} - {self._device}):
            _, _, pid, descriptor = places[self._rank_of[device]]
            try:
                memory.connect(pid, descriptor, [self._tag[channel] for channel in near if channel[4] == device])
            except OSError:
                reached = 0
        # All or nobody: both ends of a channel must agree. By now everybody has mapped what it needs.
        if min(found for (found,) in _gather([reached])):
            self._memory = memory
            self._incoming = {channel: self._tag[channel] for channel in near if channel[4] == self._device}
            self._outgoing = {channel: memory.outgoing[self._tag[channel]] for channel in near if channel[3] == self._device}
        if before:
            os.close(before.descriptor)

    def post(self, channel: Channel, form: Form) -> Receive:
        if (number := self._incoming.get(channel)) is not None and self._memory:
            return self._memory.post(number, form).wait
        group, peer = self._route[channel]
        buffer = form.empty()
        work = group.recv([buffer], peer, self._tag[channel])

        def arrived() -> torch.Tensor:
            work.wait()
            return buffer

        return arrived

    def lend(self, allowed: bool) -> None:
        if self._memory:
            for ring in self._memory.incoming.values():
                ring.lends = allowed

    def room(self, channel: Channel, form: Form) -> torch.Tensor | None:
        ring = self._outgoing.get(channel)
        return ring.room(form) if ring else None

    def timed(self, channel: Channel) -> list[tuple[int, float]]:
        if channel not in self._timed:
            self._timed[channel] = SendTimer()
        return self._timed[channel].take()

    def send(self, channel: Channel, tensor: torch.Tensor) -> None:
        timer = self._timed.get(channel)
        if ring := self._outgoing.get(channel):
            start = time.perf_counter()
            ring.put(tensor)
            if timer:
                timer.note(tensor.nbytes, time.perf_counter() - start)
            return
        group, peer = self._route[channel]
        # The tensor stays referenced until its send is done: the backend reads from its memory.
        work = group.send([tensor], peer, self._tag[channel])
        self._pending.append((timer.follow(work, tensor.nbytes) if timer else work, tensor))
        while self._pending and self._pending[0][0].is_completed():
            self._pending.popleft()

    def reduce(self, group: int, tensor: torch.Tensor) -> Handle:
        return self._met(dist.all_reduce(tensor, group=None if group == EVERYONE else self._reduce[group], async_op=True))

    def scatter(self, group: int, parts: Sequence[torch.Tensor], own: int) -> Handle:
        for number, part in enumerate(parts):
            self._met(dist.reduce(part, group=self._reduce[group], group_dst=number, async_op=True))
        return DONE

    def hand_out(self, group: int, parts: Sequence[torch.Tensor], own: int) -> Handle:
        for number, part in enumerate(parts):
            self._met(dist.broadcast(part, group=self._reduce[group], group_src=number, async_op=True))
        return DONE

    def sum_members(self, devices: tuple[int, ...], tensor: torch.Tensor) -> Handle:
        return self._met(dist.all_reduce(tensor, group=self._teams[devices], async_op=True))

    def _met(self, work: dist.Work | None) -> Handle:
        """Wait for a sum; meanwhile messages without a slot move on, since another member may wait for one before it comes."""
        if work:
            if self._memory:
                self._memory.push_until(work.is_completed)
            work.wait()
        return DONE

    finished = staticmethod(time.perf_counter)

    def flush(self, limit: int = 0) -> None:
        if self._memory:
            self._memory.flush(limit)
        while len(self._pending) > limit:
            self._pending.popleft()[0].wait()

    def close(self) -> None:
        for group in (*self._reduce, *self._teams.values()):
            if isinstance(group, dist.ProcessGroup):  # else this device is none of it
                dist.destroy_process_group(group)
        if self._memory:
            self._memory.close()


def _gather(values: list[int]) -> list[list[int]]:
    """Every rank's numbers, by rank."""
    own = torch.tensor(values, dtype=torch.int64)
    found = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(found, own)
    return [one.tolist() for one in found]
