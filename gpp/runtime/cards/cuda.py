"""A CUDA card (or one of ROCm, which torch calls by the same names): thin calls of torch."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import final

import torch
import torch.distributed as dist

from gpp.runtime.cards.card import FAR_S, AbstractCard, CardCommunicator, CardEvent, CardStream, CardWork


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
