"""What the runtime asks of an accelerator: streams, events, memory and communicators, with the rules of CUDA and NCCL.

`CudaCard` is the real card; the tests have a model of a card that follows the same rules in one process.
The rules (`docs/gpus.md` has their sources):

1. A stream runs its operations in the order in which the host has queued them. The host does not wait for them.
2. An event that was recorded on a stream is done when everything queued there before it is. A stream that waits for an
   event runs nothing queued later until then.
3. A send, a receive and a sum are operations on the communicator's own stream. This stream first waits for what the host
   had queued on the current stream. `CardWork.wait` makes the current stream wait for the operation, not the host.
4. A send and its receive are one meeting: both occupy their streams until both have come to their heads. A sum is a
   meeting of all members. A communicator runs its operations one by one, in the order of their issue; there are no tags.
5. Making a communicator, and the first message over a connection, are meetings of hosts.
6. Memory is allocated for the current stream. When the last reference is gone, it is handed out again to later
   operations of that stream at once, whatever other streams still do with it, unless `keep` was called.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Protocol, final

import torch
import torch.distributed as dist

FAR_S = 7 * 24 * 3600.0
"""Seconds after which a wait inside a worker gives up. The watch over the ranks sees a hang before, and its cause."""


class CardStream(Protocol):
    """A queue of operations on a card."""

    def synchronize(self) -> None:
        """Make the host wait for everything queued on it."""


class CardEvent(Protocol):
    """A point in a stream."""

    def record(self) -> None:
        """Put the event behind what is queued on the current stream; an event is recorded once."""

    def wait(self) -> None:
        """Make the current stream wait for the event."""

    def query(self) -> bool:
        """Whether the event is done; the host does not wait."""
        ...

    def synchronize(self) -> None:
        """Make the host wait for the event."""


class CardWork(Protocol):
    """An operation of a communicator."""

    def wait(self) -> object:
        """Make the current stream wait for the operation."""

    def is_completed(self) -> bool:
        """Whether the operation is over; the host does not wait."""
        ...


class CardCommunicator(Protocol):
    """A group of workers between which messages and sums travel. Tensors are contiguous and lie on the card."""

    def send(self, tensor: torch.Tensor, peer: int) -> CardWork:
        """Queue a send to worker `peer` (its rank among all workers). The tensor must live until the work is over."""
        ...

    def receive(self, tensor: torch.Tensor, peer: int) -> CardWork:
        """Queue a receive from worker `peer` into `tensor`."""
        ...

    def sum(self, tensor: torch.Tensor) -> CardWork:
        """Queue the sum of `tensor` over all members, in place."""
        ...


class AbstractCard(ABC):
    """One worker's accelerator.

    Args:
        device: what tensors on the card are made on.
    """

    device: torch.device

    @abstractmethod
    def stream(self) -> CardStream:
        """A new stream; the current one is the compute stream until `use` changes it."""

    @abstractmethod
    def use(self, stream: CardStream) -> AbstractContextManager[object]:
        """Context in which `stream` is the current one: operations are queued there, and memory belongs to it."""

    @abstractmethod
    def event(self, *, timed: bool = False) -> CardEvent:
        """A new event that has not been recorded yet.

        Args:
            timed: whether `seconds` may be asked of it.
        """

    @abstractmethod
    def seconds(self, start: CardEvent, end: CardEvent) -> float:
        """Seconds between two timed events that are done."""

    @abstractmethod
    def keep(self, tensor: torch.Tensor, stream: CardStream | None = None) -> None:
        """Tell the allocator that `stream` (None: the current one) uses the tensor, which was made for another one.

        Its memory is then handed out again only after what is queued on `stream` when the last reference goes.
        """

    @abstractmethod
    def pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of a tensor of main memory in pinned memory, from which `upload` reads while the host goes on."""

    @abstractmethod
    def upload(self, tensor: torch.Tensor) -> torch.Tensor:
        """Queue a copy of a tensor of main memory to the card on the current stream.

        The host goes on if the tensor is pinned; it must then stay as it is until the copy is over.
        """

    @abstractmethod
    def communicator(self, ranks: Sequence[int], name: str) -> CardCommunicator | None:
        """The communicator of these workers, made at once; None for a worker that is not one of them.

        All workers call it with the same arguments in the same order.
        """

    @abstractmethod
    def peak_memory_bytes(self) -> int:
        """Largest number of bytes of live tensors since `reset_peak`."""

    @abstractmethod
    def reset_peak(self) -> None: ...


@final
class CudaCard(AbstractCard):
    """The current CUDA device of this process.

    Args:
        device: of type `cuda`, with an index.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def stream(self) -> CardStream:
        return torch.cuda.Stream(self.device)

    def use(self, stream: CardStream) -> AbstractContextManager[object]:
        assert isinstance(stream, torch.cuda.Stream)
        return torch.cuda.stream(stream)

    def event(self, *, timed: bool = False) -> CardEvent:
        return torch.cuda.Event(enable_timing=timed)

    def seconds(self, start: CardEvent, end: CardEvent) -> float:
        assert isinstance(start, torch.cuda.Event) and isinstance(end, torch.cuda.Event)
        return start.elapsed_time(end) / 1e3

    def keep(self, tensor: torch.Tensor, stream: CardStream | None = None) -> None:
        used = torch.cuda.current_stream(self.device) if stream is None else stream
        assert isinstance(used, torch.cuda.Stream)
        tensor.record_stream(used)

    def pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.pin_memory()

    def upload(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.device, non_blocking=True)

    def communicator(self, ranks: Sequence[int], name: str) -> CardCommunicator | None:
        # With the device bound to the process group (`gpp.runtime.transport.network.join`), the communicator is made here and now.
        group = dist.new_group(
            list(ranks), timeout=timedelta(seconds=FAR_S), backend="nccl", group_desc=name, device_id=self.device
        )
        return _Nccl(group) if isinstance(group, dist.ProcessGroup) and dist.get_rank() in ranks else None

    def peak_memory_bytes(self) -> int:
        return torch.cuda.max_memory_allocated(self.device)

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)


class _Nccl:
    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._place = {rank: i for i, rank in enumerate(dist.get_process_group_ranks(group))}

    def send(self, tensor: torch.Tensor, peer: int) -> CardWork:
        return self._group.send([tensor], self._place[peer], 0)

    def receive(self, tensor: torch.Tensor, peer: int) -> CardWork:
        return self._group.recv([tensor], self._place[peer], 0)

    def sum(self, tensor: torch.Tensor) -> CardWork:
        return self._group.allreduce([tensor])
