"""Messages of workers that share a card, which NCCL refuses: through main memory, and from there as on a processor.

The host waits for the pass that made a message before it sends it: the card does not run ahead of the host as it does
with a card a worker. So this is for testing plans on one card, not for speed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import final

import torch

from gpp.runtime.cards.card import AbstractCard, CardEvent
from gpp.runtime.transport.channels import DONE, AbstractTransport, Channel, Handle, Mark, Receive
from gpp.runtime.transport.form import Form
from gpp.runtime.transport.shared_memory import RingSize


@final
class StagedTransport(AbstractTransport):
    """Tensors of a card, over a transport of tensors in main memory.

    Args:
        inner: carries the copies.
    """

    def __init__(self, card: AbstractCard, inner: AbstractTransport) -> None:
        self._card, self._inner = card, inner
        self._copied: deque[tuple[CardEvent, torch.Tensor]] = deque()
        self._finished: Mark = None

    def prepare(self, sizes: Mapping[Channel, RingSize]) -> None:
        self._inner.prepare(sizes)

    def post(self, channel: Channel, form: Form) -> Receive:
        return _Upload(self, self._inner.post(channel, Form(form.shape, form.dtype)), form.empty())

    def pinned(self, host: torch.Tensor) -> torch.Tensor:
        """A copy of a message, from which the card reads while the host goes on."""
        return self._card.pinned(host)

    def send(self, channel: Channel, tensor: torch.Tensor) -> None:
        self._inner.send(channel, tensor.cpu())
        self._mark()

    def sum_members(self, devices: tuple[int, ...], tensor: torch.Tensor) -> Handle:
        return self._sum(partial(self._inner.sum_members, devices), tensor)

    def reduce(self, group: int, tensor: torch.Tensor) -> Handle:
        return self._sum(partial(self._inner.reduce, group), tensor)

    def _sum(self, begin: Callable[[torch.Tensor], Handle], tensor: torch.Tensor) -> Handle:
        host = tensor.cpu()
        begin(host).wait()
        self.upload(host, tensor)
        self._mark()
        return DONE

    def finished(self) -> Mark:
        return self._finished

    def flush(self, limit: int = 0) -> None:
        self._inner.flush(limit)

    def upload(self, host: torch.Tensor, tensor: torch.Tensor) -> None:
        """Queue a copy to the card; `host` lives until it is over."""
        while self._copied and self._copied[0][0].query():
            self._copied.popleft()
        tensor.copy_(host, non_blocking=True)
        done = self._card.event()
        done.record()
        self._copied.append((done, host))

    def _mark(self) -> None:
        self._finished = self._card.event(timed=True)
        self._finished.record()


@final
class _Upload:
    """A receive whose message goes on to the card when it has come."""

    def __init__(self, transport: StagedTransport, receive: Receive, buffer: torch.Tensor) -> None:
        self._transport, self._receive, self._buffer = transport, receive, buffer

    def wait(self) -> torch.Tensor:
        self._transport.upload(self._transport.pinned(self._receive.wait()), self._buffer)
        return self._buffer
