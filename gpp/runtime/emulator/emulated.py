"""An emulated device: it occupies time instead of computing, and its messages carry clocks instead of tensors.

Two clocks run side by side. The virtual one is exact: an operator starts at the later of the device's clock and its
messages' arrivals, and takes as long as the cost model says. The other one is this machine's monotonic clock, which all
processes share, stretched by a time scale: an operator sleeps, and a message says before when it must not be used.
The time of the second beyond the first is the runtime's overhead.
"""

from __future__ import annotations

import ctypes
import time
from typing import Generic, TypeVar, final

import torch

from gpp.cluster import Cluster
from gpp.cost.stage import StageCost
from gpp.graph.op_graph import OpGraph
from gpp.plan.plan import Plan
from gpp.program.added import CopyCosts
from gpp.program.held import Meter
from gpp.program.kinds import BACKWARD, FORWARD, KINDS, PASS, Resource, pass_seconds
from gpp.program.program import NORM_BYTES, reduce_groups
from gpp.program.waits import EVERYONE
from gpp.runtime.transport.channels import AbstractTransport, Channel
from gpp.runtime.transport.form import Form
from gpp.runtime.worker.mailbox import AbstractMailbox, Posted
from gpp.runtime.worker.stage import Span

CLOCKS = Form((2,), torch.float64)
"""The form of a message, two numbers: when it arrives by the virtual clock, and by this machine's."""

PR_SET_TIMERSLACK = 29


def sharpen_timer() -> None:
    """Let the kernel end this process's sleeps on time rather than with up to 50 us of slack (Linux only)."""
    ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0)


def sleep_until(when_s: float) -> None:
    """Return at `when_s` on the monotonic clock, or at once if that has passed."""
    while (left := when_s - time.perf_counter()) > 0:
        time.sleep(left)


class Clock:
    """A device's time by both clocks; with `time_scale` 0 only the virtual one runs.

    `zero_s` is when, by this machine's clock, the virtual one stood at 0; `opened_s` when, by the virtual one, the
    device was first occupied in the present step.
    """

    def __init__(self) -> None:
        self.virtual_s = 0.0
        self.time_scale = 0.0
        self.zero_s = 0.0
        self.opened_s: float | None = None

    def real_s(self, virtual_s: float) -> float:
        """The time by this machine's clock at which the virtual clock shows `virtual_s`, if nothing is late."""
        return self.zero_s + virtual_s * self.time_scale

    def occupy(self, virtual_start_s: float, duration_s: float) -> Span:
        """Keep the device busy for `duration_s`, from now on and, by the virtual clock, from `virtual_start_s` on."""
        self.opened_s = virtual_start_s if self.opened_s is None else self.opened_s
        self.virtual_s = virtual_start_s + duration_s
        start = time.perf_counter()
        sleep_until(start + duration_s * self.time_scale)
        return start, time.perf_counter()


When = tuple[float, float]
"""A time by the virtual clock and by this machine's."""

_LONG_AGO: When = (0.0, 0.0)
Name = TypeVar("Name", Channel, Resource)


@final
class EmulatedChannels(Generic[Name]):
    """Channels of a device, each of which carries one thing at a time."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.free: dict[Name, When] = {}
        """When each channel is free again."""
        self._opened: dict[Name, tuple[float, float]] = {}

    def begin(self, *, anew: bool) -> None:
        """Start to follow the clock; `anew`: nothing is under way."""
        self.free = {} if anew else {name: (free, self.clock.real_s(free)) for name, (free, _) in self.free.items()}
        self._opened.clear()

    def occupy(self, name: Name, seconds: float, *, after: When) -> tuple[When, When]:
        """Begin and end of what a channel carries next: now, when it is free, or later."""
        free = self.free.get(name, _LONG_AGO)
        begin = max(self.clock.virtual_s, free[0], after[0]), max(time.perf_counter(), free[1], after[1])
        self._opened.setdefault(name, (free[0], begin[0]))
        over = self.free[name] = begin[0] + seconds, begin[1] + seconds * self.clock.time_scale
        return begin, over

    def used(self) -> list[tuple[float, float, float]]:
        """(free before, first used, free now) of each channel used since the last call, by the virtual clock."""
        out = [(*opened, self.free[name][0]) for name, opened in self._opened.items()]
        self._opened.clear()
        return out


class EmulatedMailbox(AbstractMailbox):
    """Messages that say when they arrive. A hand-over between stages of this device takes no time.

    Args:
        rates: bytes of messages, see `gpp.simulate.messages.message_rates`.
    """

    def __init__(
        self,
        *,
        stage: int,
        device_id: int,
        transport: AbstractTransport,
        rates: dict[tuple[str, int, int], tuple[float, float]],
        cluster: Cluster,
        clock: Clock,
    ) -> None:
        super().__init__(stage=stage, device_id=device_id, transport=transport)
        self.rates, self.cluster, self.clock = rates, cluster, clock
        self.ready_s = 0.0
        """When, by the virtual clock, the device and the messages of the compute action last awaited were ready."""
        self.channels = EmulatedChannels[Channel](clock)

    def _form(self, channel: Channel, samples: int) -> Form:
        return CLOCKS

    def _accept(self, direction: str, microbatch: int, messages: list[Posted]) -> None:
        """Wait for the time at which the messages may be used."""
        virtual_s, real_s = self.clock.virtual_s, 0.0
        for message in messages:
            if message.buffer is not None:
                arrival = message.buffer.tolist()
                virtual_s, real_s = max(virtual_s, arrival[0]), max(real_s, arrival[1])
        self.ready_s = virtual_s
        sleep_until(real_s)

    def _message(self, channel: Channel, microbatch: int, lo: int, hi: int, last: bool) -> tuple[torch.Tensor, int]:
        """The arrival of a transfer on its own first-in first-out channel, and the bytes of the real message."""
        direction, stage, peer_stage, device, peer_device = channel
        per_sample, fixed = self.rates[direction, stage, peer_stage]
        num_bytes = per_sample * (hi - lo) + fixed
        link = self.cluster.link(device, peer_device)
        taken = self._taken_s(channel, microbatch), 0.0
        _, over = self.channels.occupy(channel, num_bytes / link.bandwidth_bytes_per_s, after=taken)
        arrival = [over[0] + link.latency_s, over[1] + link.latency_s * self.clock.time_scale]
        return torch.tensor(arrival, dtype=torch.float64), round(num_bytes)

    def _taken_s(self, channel: Channel, microbatch: int) -> float:
        """When, by the virtual clock, the reader has room for a message: at once in a training, whose order bounds what flies."""
        return 0.0

    def _hand_over(self, direction: str, microbatch: int, peer_stage: int, lo: int, hi: int, last: bool) -> None:
        return None


@final
class EmulatedHost:
    """A device's channels to its host and back, which all its stages use.

    Args:
        costs: what copies take.
    """

    def __init__(self, costs: CopyCosts, clock: Clock) -> None:
        self.costs, self.clock = costs, clock
        self.channels = EmulatedChannels[Resource](clock)

    def copy(self, way: Resource, stage: int, *, last: bool, after: When) -> tuple[When, Span]:
        """When a copy is over that begins now, or later; and when it runs, by this machine's clock."""
        seconds, _ = self.costs[way, stage].of(last=last)
        begin, over = self.channels.occupy(way, seconds, after=after)
        return over, (begin[1], over[1])


@final
class EmulatedRunner:
    """A stage on an emulated device: it occupies the device for as long as its cost says.

    Args:
        cost: times and bytes of the stage.
        last: the stage's last micro-batch of a step.
        held: is told the device's passes.
    """

    def __init__(
        self,
        *,
        stage: int,
        cost: StageCost,
        last: int,
        mailbox: EmulatedMailbox,
        host: EmulatedHost,
        clock: Clock,
        held: Meter,
    ) -> None:
        self.stage, self.last, self.mailbox, self.host, self.clock, self.held = stage, last, mailbox, host, clock, held
        self.update_s = cost.update_s
        self._seconds = {is_last: pass_seconds(cost, last=is_last) for is_last in (False, True)}
        self._going = _LONG_AGO
        """When the last copy to the host is over."""
        self._gone: dict[int, When] = {}
        self._coming: dict[int, When] = {}

    def begin(self, *, anew: bool) -> None:
        """Start to follow the clock; `anew`: nothing is in flight, and no transfer under way."""
        if anew:
            self._going = _LONG_AGO
            self._gone.clear()
            self._coming.clear()
        self._going = self._going[0], self.clock.real_s(self._going[0])
        self.mailbox.channels.begin(anew=anew)

    def forward(self, microbatch: int) -> Span:
        """Occupy the device for a forward; the micro-batch is in flight from then on."""
        return self.run(PASS[FORWARD], microbatch)

    def backward(self, microbatch: int) -> Span:
        """Occupy the device for a backward."""
        return self.run(PASS[BACKWARD], microbatch)

    def run(self, kind: str, microbatch: int) -> Span:
        """Occupy the device for a pass, when the messages are there, and the copies that it needs are over."""
        row = KINDS[kind]
        copied = self._going if row.holds else self._coming.pop(microbatch, _LONG_AGO) if row.returns else _LONG_AGO
        self.held.take(kind, self.stage)
        sleep_until(copied[1])
        begin_s = max(self.clock.virtual_s, self.mailbox.ready_s, copied[0])
        return self.clock.occupy(begin_s, self._seconds[microbatch == self.last][kind])

    def copy_out(self, microbatch: int) -> Span:
        """Occupy the channel to the host."""
        self._going, span = self.host.copy(Resource.COPY_OUT, self.stage, last=microbatch == self.last, after=_LONG_AGO)
        self._gone[microbatch] = self._going
        return span

    def fetch(self, microbatch: int) -> Span:
        """Occupy the channel from the host, once the micro-batch is there; while another is in use, once nothing goes there."""
        gone = self._gone.pop(microbatch)
        after = max(gone, self._going) if self._coming else gone
        self._coming[microbatch], span = self.host.copy(Resource.COPY_IN, self.stage, last=microbatch == self.last, after=after)
        return span

    def update(self) -> None:
        """Occupy the device for the optimizer's step."""
        self.clock.occupy(self.clock.virtual_s, self.update_s)


@final
class EmulatedSums:
    """Reductions: one starts when its last member is there, and occupies all of them for its modelled time."""

    def __init__(
        self, plan: Plan, graph: OpGraph, cluster: Cluster, *, device_id: int, transport: AbstractTransport, clock: Clock
    ) -> None:
        self._device, self._transport, self._clock = device_id, transport, clock
        groups = dict(enumerate(reduce_groups(plan, graph)))
        self._members = {g: group.devices for g, group in groups.items()} | {EVERYONE: tuple(sorted(plan.stages_of_device))}
        self._bytes = {g: group.num_bytes(graph) for g, group in groups.items()} | {EVERYONE: float(NORM_BYTES)}
        self._seconds = {g: cluster.allreduce_s(self._bytes[g], members) for g, members in self._members.items()}

    def reduce(self, group: int) -> int:
        """Sum a group's gradients; returns the bytes that a ring all-reduce moves over each member's link."""
        members = self._members[group]
        # Each member adds its clock at a place of its own, so the sum holds all of them.
        reached = torch.zeros(len(members), dtype=torch.float64)
        reached[members.index(self._device)] = self._clock.virtual_s
        self._transport.reduce(group, reached).wait()
        self._clock.occupy(max(reached.tolist()), self._seconds[group])
        return round(self._bytes[group] * 2 * (len(members) - 1) / len(members))

    def clip(self) -> int:
        """The sum over all devices that clipping needs; returns the bytes moved."""
        self.reduce(EVERYONE)
        return NORM_BYTES
