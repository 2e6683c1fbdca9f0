"""An emulated device: it occupies time instead of computing, and its messages carry clocks instead of tensors.

Two clocks run side by side. The virtual one is exact: an operator starts at the later of the device's clock and its
messages' arrivals, and takes what the cost model says. The other one is this machine's monotonic clock, which all
processes share, stretched by a time scale: an operator sleeps, and a message says before when it must not be used.
What the second has beyond the first is the runtime's own doing.
"""

from __future__ import annotations

import ctypes
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any, final

import torch

from gpp.cluster import Cluster
from gpp.cost.stage import StageCost
from gpp.graph.op_graph import OpGraph
from gpp.plan.plan import Plan
from gpp.program.kinds import TRANSFERS
from gpp.program.program import NORM_BYTES, Action, channel_of, reduce_groups
from gpp.program.waits import EVERYONE
from gpp.runtime.transport.channels import AbstractTransport, Channel, Handle
from gpp.runtime.transport.shared_memory import RingSize
from gpp.runtime.worker.stage import Span

CLOCKS = 2
"""Numbers in a message: when it arrives by the virtual clock, and by this machine's."""

PR_SET_TIMERSLACK = 29


def sharpen_timer() -> None:
    """Let the kernel end this process's sleeps on time rather than with up to 50 us of slack (Linux only)."""
    ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0)


def sleep_until(when_s: float) -> None:
    """Return at `when_s` on the monotonic clock, or at once if that has passed."""
    while (left := when_s - time.perf_counter()) > 0:
        time.sleep(left)


def ring_sizes(actions: Iterable[Action], device: int) -> dict[Channel, RingSize]:
    """The room that each channel of `device` needs: all messages of a step, as they are small."""
    count: Counter[Channel] = Counter()
    for action in actions:
        if action.kind in TRANSFERS and action.peer_device != device:
            count[channel_of(action, device)] += 1
    return {channel: RingSize(8 * CLOCKS, messages) for channel, messages in count.items()}


class Clock:
    """A device's time by both clocks; with `time_scale` 0 only the virtual one runs.

    `zero_s` is when, by this machine's clock, the virtual one stood at 0; `opened_s` when, by the virtual one, the device was first
    occupied in the present step.
    """

    def __init__(self) -> None:
        self.virtual_s = 0.0
        self.time_scale = 0.0
        self.zero_s = 0.0
        self.opened_s: float | None = None

    def real_s(self, virtual_s: float) -> float:
        """When it is `virtual_s` by this machine's clock, if nothing is late."""
        return self.zero_s + virtual_s * self.time_scale

    def occupy(self, virtual_start_s: float, duration_s: float) -> Span:
        """Keep the device busy for `duration_s`, from now on and, by the virtual clock, from `virtual_start_s` on."""
        self.opened_s = virtual_start_s if self.opened_s is None else self.opened_s
        self.virtual_s = virtual_start_s + duration_s
        start = time.perf_counter()
        sleep_until(start + duration_s * self.time_scale)
        return start, time.perf_counter()


@final
class EmulatedRunner:
    """The interpreter's view of a stage on an emulated device, as `StageRunner` is of a real one.

    Args:
        rates: of messages, see `gpp.simulate.simulator.message_rates`.
        cost: of the stage.
        last: its last micro-batch.
    """

    def __init__(
        self,
        *,
        stage: int,
        device_id: int,
        cost: StageCost,
        last: int,
        rates: dict[tuple[str, int, int], tuple[float, float]],
        cluster: Cluster,
        transport: AbstractTransport,
        clock: Clock,
    ) -> None:
        self.stage, self.device_id, self.cost, self.last, self.clock = stage, device_id, cost, last, clock
        self.transport, self.cluster, self.rates = transport, cluster, rates
        self.results: dict[str, Any] = {}
        self.in_flight = self.most_in_flight = 0
        self.keeps = False
        self._posted: dict[tuple[str, int], list[tuple[Handle, torch.Tensor]]] = defaultdict(list)
        self._ready_s = 0.0
        self._channel_free: dict[Channel, tuple[float, float]] = {}
        self._opened: dict[Channel, tuple[float, float]] = {}

    def begin(self, *, anew: bool) -> None:
        """Start to follow the clock; `anew`: nothing is in flight, and no transfer under way."""
        if anew:
            self.in_flight = 0
            self._channel_free.clear()
        for channel, (virtual_s, _) in self._channel_free.items():
            self._channel_free[channel] = virtual_s, self.clock.real_s(virtual_s)
        self._opened.clear()

    def channels(self) -> list[tuple[float, float, float]]:
        """Of each channel used since the last call: free before, first used, free now, by the virtual clock."""
        out = [(*opened, self._channel_free[channel][0]) for channel, opened in self._opened.items()]
        self._opened.clear()
        return out

    def post(self, direction: str, microbatch: int, peer_stage: int, peer_device: int, lo: int, hi: int) -> None:
        """Start to receive a message for a coming compute action; what this device itself hands over takes no time."""
        if peer_device == self.device_id:
            return
        buffer = torch.empty(CLOCKS, dtype=torch.float64)
        handle = self.transport.post((direction, peer_stage, self.stage, peer_device, self.device_id), buffer)
        self._posted[direction, microbatch].append((handle, buffer))

    def arrive(self, direction: str, microbatch: int) -> None:
        """Wait for the messages of a compute action, and for the time at which they may be used."""
        virtual_s, real_s = self.clock.virtual_s, 0.0
        for handle, buffer in self._posted.pop((direction, microbatch), ()):
            handle.wait()
            arrival = buffer.tolist()
            virtual_s, real_s = max(virtual_s, arrival[0]), max(real_s, arrival[1])
        self._ready_s = virtual_s
        sleep_until(real_s)

    def forward(self, microbatch: int) -> Span:
        """Occupy the device for a forward; the micro-batch is in flight from then on."""
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        return self.clock.occupy(self._ready_s, self.cost.last_forward_s if microbatch == self.last else self.cost.forward_s)

    def backward(self, microbatch: int) -> Span:
        """Occupy the device for a backward."""
        self.in_flight, self.keeps = self.in_flight - 1, True
        return self.clock.occupy(self._ready_s, self.cost.last_backward_s if microbatch == self.last else self.cost.backward_s)

    def send(self, direction: str, microbatch: int, peer_stage: int, peer_device: int, lo: int, hi: int, last: bool) -> int:
        """Start a transfer on its own first-in first-out channel; returns the bytes that the real message would have."""
        if peer_device == self.device_id:
            return 0
        per_sample, fixed = self.rates[direction, self.stage, peer_stage]
        num_bytes = per_sample * (hi - lo) + fixed
        channel: Channel = (direction, self.stage, peer_stage, self.device_id, peer_device)
        link, scale = self.cluster.link(self.device_id, peer_device), self.clock.time_scale
        occupied_s = num_bytes / link.bandwidth_bytes_per_s
        free = self._channel_free.get(channel, (0.0, 0.0))
        begin_s = max(self.clock.virtual_s, free[0])
        self._opened.setdefault(channel, (free[0], begin_s))
        virtual_s = begin_s + occupied_s
        real_s = max(time.perf_counter(), free[1]) + occupied_s * scale if scale else 0.0
        self._channel_free[channel] = virtual_s, real_s
        arrival = [virtual_s + link.latency_s, real_s + link.latency_s * scale]
        self.transport.send(channel, torch.tensor(arrival, dtype=torch.float64))
        return round(num_bytes)

    def update(self) -> None:
        """Occupy the device for the optimizer's step."""
        self.clock.occupy(self.clock.virtual_s, self.cost.update_s)

    @property
    def peak_memory_bytes(self) -> float:
        """By the plan's own reckoning, of as many micro-batches as were in flight at a time; one where none goes back."""
        return self.cost.memory.peak(self.most_in_flight if self.keeps else 1)


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
        """Sum a group's gradients; returns the bytes that a ring moves over each member's link."""
        members = self._members[group]
        # Each member adds its clock at a place of its own, so the sum holds all of them.
        reached = torch.zeros(len(members), dtype=torch.float64)
        reached[members.index(self._device)] = self._clock.virtual_s
        self._transport.reduce(group, reached)
        self._clock.occupy(max(reached.tolist()), self._seconds[group])
        return round(self._bytes[group] * 2 * (len(members) - 1) / len(members))

    def clip(self) -> int:
        """The sum over all devices that clipping needs; returns the bytes moved."""
        self.reduce(EVERYONE)
        return NORM_BYTES
