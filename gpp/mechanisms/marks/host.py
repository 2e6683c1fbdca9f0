"""Copies of what a micro-batch has on the host, on its way there and back.

On a card two streams make the copies, from and to pinned memory, and the host waits for none. On a processor the host's
memory is the device's own, so a copy saves nothing but what the allocator counts: it shows on one machine what offload
does on cards. A thread a direction makes them, as a card's two copy engines do.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, final

import numpy as np
import torch
from torch import Tensor

from gpp.runtime.cards.card import AbstractCard, CardEvent
from gpp.runtime.worker.clock import CopyMark
from gpp.runtime.worker.stage import Span


class Copying(NamedTuple):
    """A copy that was begun.

    Args:
        span: when it begins and ends.
        gone: tells whether it has ended.
        wait: lets the device go on only when it has.
    """

    span: Span
    gone: Callable[[], bool]
    wait: Callable[[], object]


class AbstractCopies(ABC):
    """The copies of a device, one after the other in each direction; memory of the host is used again for the same size."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._free: dict[int, list[Tensor]] = defaultdict(list)

    @abstractmethod
    def copy(self, into: Sequence[Tensor], of: Sequence[Tensor], *, out: bool) -> Copying:
        """Begin to copy flat tensors to the host, or back (`out` false); they must stay as they are until that has ended."""

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


@final
class HostCopies(AbstractCopies):
    """Copies by threads, between PyTorch's memory and other memory of the same machine.

    The other memory is numpy's, which PyTorch's allocator does not count.

    Args:
        now: the clock of the device, asked in the threads.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        super().__init__(torch.device("cpu"))
        self.now = now
        self.away = ThreadPoolExecutor(1, thread_name_prefix="copy-out")
        self.home = ThreadPoolExecutor(1, thread_name_prefix="copy-in")

    def copy(self, into: Sequence[Tensor], of: Sequence[Tensor], *, out: bool) -> Copying:
        # Lists of their own, which the thread empties.
        found = (self.away if out else self.home).submit(_copy, self.now, [*into], [*of])
        return Copying((CopyMark(found, 0), CopyMark(found, 1)), found.done, found.result)

    def make(self, like: Tensor) -> Tensor:
        return torch.from_numpy(np.empty(like.nbytes, np.uint8)).view(like.dtype)


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
        super().__init__(card.device)
        self.card, self.away, self.home = card, card.stream(), card.stream()

    def copy(self, into: Sequence[Tensor], of: Sequence[Tensor], *, out: bool) -> Copying:
        ready = self._mark()
        with self.card.use(self.away if out else self.home):
            ready.wait()
            start = self._mark()
            for there, here in zip(into, of, strict=True):
                there.copy_(here, non_blocking=True)
            done = self._mark()
        return Copying((start, done), done.query, done.wait)

    def make(self, like: Tensor) -> Tensor:
        return self.card.pinned(torch.empty(like.shape, dtype=like.dtype, device="cpu"))

    def _mark(self) -> CardEvent:
        event = self.card.event(timed=True)
        event.record()
        return event
