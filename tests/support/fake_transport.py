"""The contract of a transport inside one process, so that distributed logic is tested without processes."""

from __future__ import annotations

import queue
import threading
import time
from collections import defaultdict
from collections.abc import Mapping
from typing import final

import torch

from gpp.program.program import ReduceGroup
from gpp.program.waits import EVERYONE
from gpp.runtime.transport.channels import DONE, AbstractTransport, Channel, Handle, Receive
from gpp.runtime.transport.form import Form
from gpp.runtime.transport.shared_memory import RingSize


class FakeNetwork:
    """Queues shared by the fake transports of one process (one thread a device)."""

    def __init__(self, groups: tuple[ReduceGroup, ...], num_devices: int, timeout_s: float = 60.0) -> None:
        self.queues: dict[Channel, queue.Queue[torch.Tensor]] = defaultdict(queue.Queue)
        self.lock = threading.Lock()
        self.timeout_s = timeout_s
        sizes = {EVERYONE: num_devices} | {g: len(group.devices) for g, group in enumerate(groups)}
        self.barriers = {g: threading.Barrier(size) for g, size in sizes.items()}
        self.terms: dict[int, dict[int, torch.Tensor]] = {g: {} for g in sizes}
        self.teams: dict[tuple[int, ...], tuple[threading.Barrier, dict[int, torch.Tensor]]] = {}

    def team(self, devices: tuple[int, ...]) -> tuple[threading.Barrier, dict[int, torch.Tensor]]:
        """Where the devices of a replica meet; made by the first of them."""
        with self.lock:
            return self.teams.setdefault(devices, (threading.Barrier(len(devices)), {}))


@final
class FakeTransport(AbstractTransport):
    """The same contract inside one process, so that distributed logic is tested without processes."""

    def __init__(self, network: FakeNetwork, device: int) -> None:
        self._network, self._device = network, device

    def prepare(self, sizes: Mapping[Channel, RingSize]) -> None:
        return None

    def post(self, channel: Channel, form: Form) -> Receive:
        source, buffer = self._queue(channel), form.empty()
        return lambda: buffer.copy_(source.get(timeout=self._network.timeout_s).view_as(buffer))

    def send(self, channel: Channel, tensor: torch.Tensor) -> None:
        self._queue(channel).put(tensor.detach().clone())

    def _queue(self, channel: Channel) -> queue.Queue[torch.Tensor]:
        with self._network.lock:
            return self._network.queues[channel]

    def reduce(self, group: int, tensor: torch.Tensor) -> Handle:
        return self._sum(self._network.barriers[group], self._network.terms[group], tensor)

    def sum_members(self, devices: tuple[int, ...], tensor: torch.Tensor) -> Handle:
        return self._sum(*self._network.team(devices), tensor)

    def _sum(self, barrier: threading.Barrier, terms: dict[int, torch.Tensor], tensor: torch.Tensor) -> Handle:
        terms[self._device] = tensor.clone()
        barrier.wait(self._network.timeout_s)
        # In the order of the devices: the order of arrival would change the last bit from run to run.
        tensor.copy_(torch.stack([terms[device] for device in sorted(terms)]).sum(0))
        barrier.wait(self._network.timeout_s)
        return DONE

    finished = staticmethod(time.perf_counter)

    def flush(self, limit: int = 0) -> None:
        return None
