"""What a micro-batch has on the host, on its way there and back.

On a card two streams make the copies, from and to pinned memory, and the host waits for none. On a processor the host's
memory is the device's own, so a copy saves nothing but what the allocator counts: it shows on one machine what offload
does on cards. A thread a direction makes them, as a card's two copy engines do.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import final

import numpy as np
import torch
from torch import Tensor

from gpp.runtime.cards.card import AbstractCard, CardEvent
from gpp.runtime.worker.clock import CopyMark
from gpp.runtime.worker.stage import Span


class AbstractCopies(ABC):
    """The copies of a device, one after the other in each direction; memory of the host is used again for the same size."""

    def __init__(self) -> None:
        self._free: dict[int, list[Tensor]] = defaultdict(list)

    @abstractmethod
    def out(self, tensors: Sequence[Tensor]) -> AbstractParcel:
        """Begin to copy flat tensors to the host; they must stay as they are until the parcel has left."""

    @abstractmethod
    def make(self, like: Tensor) -> Tensor:
        """Further memory of the host for a flat tensor."""

    @final
    def take(self, like: Tensor) -> Tensor:
        """Memory of the host for a flat tensor. A stream that read it before was waited for by the one that the new copy waits
        for."""
        free = self._free[like.nbytes]
        return free.pop().view(like.dtype) if free else self.make(like)

    @final
    def give(self, buffers: Sequence[Tensor]) -> None:
        """It is not needed any more by what the current stream goes on with."""
        for buffer in buffers:
            self._free[buffer.nbytes].append(buffer)


class AbstractParcel(ABC):
    """The tensors of one micro-batch; `span` is that of the copy that was begun last."""

    span: Span

    def __init__(self, copies: AbstractCopies, tensors: Sequence[Tensor]) -> None:
        self._source, self._tensors, self._buffers = copies, list(tensors), list[Tensor]()

    @property
    @abstractmethod
    def gone(self) -> bool:
        """Whether the copy that was begun last has ended."""

    @abstractmethod
    def wait(self) -> None:
        """Let the device go on only when it has."""

    @abstractmethod
    def back(self) -> None:
        """Begin to copy them to the device, into new tensors, once they have left."""

    @final
    def leave(self) -> None:
        """Let the device go on only when all are on the host, and let go of them."""
        self.wait()
        self._tensors = []

    @final
    def arrive(self) -> list[Tensor]:
        """Let the device go on only when they are back; the new tensors in the same order."""
        self.wait()
        self._source.give(self._buffers)
        found, self._tensors, self._buffers = self._tensors, [], []
        return found


@final
class HostCopies(AbstractCopies):
    """Copies by threads, between PyTorch's memory and other memory of the same machine.

    The other memory is numpy's, which PyTorch's allocator does not count.

    Args:
        now: the clock of the device, asked in the threads.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        super().__init__()
        self.now = now
        self.away = ThreadPoolExecutor(1, thread_name_prefix="copy-out")
        self.home = ThreadPoolExecutor(1, thread_name_prefix="copy-in")

    def out(self, tensors: Sequence[Tensor]) -> AbstractParcel:
        return _HostParcel(self, tensors)

    def make(self, like: Tensor) -> Tensor:
        return torch.from_numpy(np.empty(like.nbytes, np.uint8)).view(like.dtype)


@final
class _HostParcel(AbstractParcel):
    def __init__(self, copies: HostCopies, tensors: Sequence[Tensor]) -> None:
        super().__init__(copies, tensors)
        self._copies, self._buffers = copies, [copies.take(tensor) for tensor in tensors]
        self._begin(copies.away, self._buffers, self._tensors)

    def _begin(self, thread: ThreadPoolExecutor, into: Sequence[Tensor], of: Sequence[Tensor]) -> None:
        # Lists of their own, which the thread empties.
        self._way = thread.submit(_copy, self._copies.now, [*into], [*of])
        self.span = CopyMark(self._way, 0), CopyMark(self._way, 1)

    @property
    def gone(self) -> bool:
        return self._way.done()

    def wait(self) -> None:
        self._way.result()

    def back(self) -> None:
        # Made here: the allocator's account of a worker is that of its own thread.
        self._tensors = [torch.empty_like(buffer) for buffer in self._buffers]
        self._begin(self._copies.home, self._tensors, self._buffers)


def _copy(now: Callable[[], float], into: list[Tensor], of: list[Tensor]) -> tuple[float, float]:
    """Copy tensors, and forget them; when it began and ended.

    The last to let go of a tensor must be the worker's own thread, whose allocator's account it is in.
    """
    start = now()
    with torch.no_grad():
        while of:
            into.pop().copy_(of.pop())
    return start, now()


@final
class CardCopies(AbstractCopies):
    """Copies by two streams of a card, from and to pinned memory."""

    def __init__(self, card: AbstractCard) -> None:
        super().__init__()
        self.card, self.away, self.home = card, card.stream(), card.stream()

    def out(self, tensors: Sequence[Tensor]) -> AbstractParcel:
        return _CardParcel(self, tensors)

    def make(self, like: Tensor) -> Tensor:
        return self.card.pinned(torch.empty(like.shape, dtype=like.dtype, device="cpu"))


@final
class _CardParcel(AbstractParcel):
    def __init__(self, copies: CardCopies, tensors: Sequence[Tensor]) -> None:
        super().__init__(copies, tensors)
        self._copies = copies
        made = self._mark()
        with copies.card.use(copies.away):
            made.wait()
            start = self._mark()
            self._buffers = [copies.take(tensor) for tensor in self._tensors]
            for buffer, tensor in zip(self._buffers, self._tensors, strict=True):
                buffer.copy_(tensor, non_blocking=True)
            self._done = self._mark()
        self.span = start, self._done

    def _mark(self) -> CardEvent:
        event = self._copies.card.event(timed=True)
        event.record()
        return event

    @property
    def gone(self) -> bool:
        return self._done.query()

    def wait(self) -> None:
        self._done.wait()

    def back(self) -> None:
        # Made on the stream that uses them, and written when that has come here: their memory may have been another's.
        self._tensors = [torch.empty(b.shape, dtype=b.dtype, device=self._copies.card.device) for b in self._buffers]
        ready = self._mark()
        with self._copies.card.use(self._copies.home):
            ready.wait()
            start = self._mark()
            for tensor, buffer in zip(self._tensors, self._buffers, strict=True):
                tensor.copy_(buffer, non_blocking=True)
            self._done = self._mark()
        self.span = start, self._done
