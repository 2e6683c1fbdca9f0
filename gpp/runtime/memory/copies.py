"""Storages of a micro-batch on their way to the host and back.

On a processor the host's memory is the device's own, so a copy saves nothing but what the allocator counts: it shows on
one machine what offload does on cards. A thread a direction makes the copies, as a card's two copy engines do.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import final

import numpy as np
import torch
from torch import Tensor

from gpp.runtime.memory.slots import on_storage
from gpp.runtime.transport.channels import Mark

Storage = torch.UntypedStorage


class AbstractCopies(ABC):
    """The copies of a device, one after the other in each direction."""

    @abstractmethod
    def out(self, storages: Sequence[Storage]) -> Parcel:
        """Begin to copy storages to the host; they must stay as they are until the parcel has left."""

    @abstractmethod
    def back(self, parcel: Parcel) -> None:
        """Begin to copy them back, into new storages, once they have left."""


class Parcel(ABC):
    """The storages of one micro-batch.

    Args:
        num_bytes: of all of them.
    """

    num_bytes: int

    @property
    @abstractmethod
    def span(self) -> tuple[Mark, Mark]:
        """When the copy that was begun last begins and ends, by the clock of the device."""

    @property
    @abstractmethod
    def gone(self) -> bool:
        """Whether they are on the host, so that the device's own can be let go of."""

    @abstractmethod
    def leave(self) -> None:
        """Wait until they are there, and let go of the device's."""

    @abstractmethod
    def arrive(self) -> list[Storage]:
        """Wait until they are back; the new storages in the same order."""


@final
class CopyMark:
    """The beginning (0) or the end (1) of a copy that a thread makes."""

    def __init__(self, way: Future[tuple[float, float]], end: int) -> None:
        self._way, self._end = way, end

    @property
    def time_s(self) -> float | None:
        """By the clock of the thread that made it; None before it is over."""
        return self._way.result()[self._end] if self._way.done() else None


@final
class HostCopies(AbstractCopies):
    """Copies by threads, between PyTorch's memory and other memory of the same machine.

    The other memory is numpy's, which PyTorch's allocator does not count, and is used again for storages of the same size.

    Args:
        now: the clock of the device, asked in the threads.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._out = ThreadPoolExecutor(1, thread_name_prefix="copy-out")
        self._in = ThreadPoolExecutor(1, thread_name_prefix="copy-in")
        self._free: dict[int, list[Tensor]] = defaultdict(list)

    def out(self, storages: Sequence[Storage]) -> HostParcel:
        parcel = HostParcel(storages, [self._buffer(storage.nbytes()) for storage in storages])
        parcel.way = self._out.submit(_copy, self._now, [*parcel.buffers], _bytes(storages))
        return parcel

    def back(self, parcel: Parcel) -> None:
        assert isinstance(parcel, HostParcel)
        parcel.leave()
        # Made here: the allocator's account of a worker is that of its own thread.
        parcel.storages = [torch.empty(len(buffer), dtype=torch.uint8).untyped_storage() for buffer in parcel.buffers]
        parcel.way = self._in.submit(_copy, self._now, _bytes(parcel.storages), [*parcel.buffers])
        parcel.back_to = self._free

    def _buffer(self, num_bytes: int) -> Tensor:
        free = self._free[num_bytes]
        return free.pop() if free else torch.from_numpy(np.empty(num_bytes, np.uint8))


@final
class HostParcel(Parcel):
    """Of `HostCopies`; `buffers` are on the host, `storages` the device's."""

    def __init__(self, storages: Sequence[Storage], buffers: list[Tensor]) -> None:
        self.storages, self.buffers, self.num_bytes = list(storages), buffers, sum(map(len, buffers))
        self.way: Future[tuple[float, float]]
        self.back_to: dict[int, list[Tensor]] = {}

    @property
    def span(self) -> tuple[Mark, Mark]:
        return CopyMark(self.way, 0), CopyMark(self.way, 1)

    @property
    def gone(self) -> bool:
        return self.way.done()

    def leave(self) -> None:
        self.way.result()
        self.storages = []

    def arrive(self) -> list[Storage]:
        self.way.result()
        found, self.storages = self.storages, []
        for buffer in self.buffers:
            self.back_to[len(buffer)].append(buffer)
        self.buffers = []
        return found


def _bytes(storages: Sequence[Storage]) -> list[Tensor]:
    return [on_storage(storage, torch.uint8, (storage.nbytes(),), (1,), 0) for storage in storages]


def _copy(now: Callable[[], float], into: list[Tensor], of: list[Tensor]) -> tuple[float, float]:
    """Copy tensors, and forget them; when it began and ended.

    The last to let go of a storage must be the worker's own thread, whose allocator's account it is in.
    """
    start = now()
    with torch.no_grad():
        while of:
            into.pop().copy_(of.pop())
    return start, now()
