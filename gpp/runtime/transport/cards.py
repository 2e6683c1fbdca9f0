"""Messages between cards: the host does not wait for a card that one worker has, and nothing can deadlock.

* Every device issues its messages in one global order (`gpp.program.global_order`): even if a card ran one
  operation at a time, and every send waited for its receive, the earliest message that is not done has both ends at the
  heads of their queues.
* On top of that, the messages of an ordered pair of devices stand in line behind no other pair's on either card:
  `gpp.program.communicators` gives each card one communicator a pair and role, and as few as that takes in all.
* A receive is queued from a stream of its own, which owns the buffer, so that it need not wait for passes that the host
  has queued before. The pass that needs the message waits for an event; the allocator is told that it reads the buffer.
* A tensor that is sent stays referenced until the host has seen that its send is over.

NCCL refuses workers that share a card: they have `StagedTransport`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import final

import torch

from gpp.program.communicators import Communicator, Pair, first_messages
from gpp.runtime.cards.card import AbstractCard, CardEvent, CardStream, CardWork
from gpp.runtime.cards.card import CardCommunicator as Line
from gpp.runtime.transport.channels import DONE, AbstractTransport, Channel, Handle, Mark, Receive
from gpp.runtime.transport.form import Form
from gpp.runtime.transport.shared_memory import RingSize


@final
class CardTransport(AbstractTransport):
    """The messages and sums of one device of the plan.

    Args:
        communicators: those of all devices (`gpp.program.communicators.communicators`), made here, in their order.
        device: this worker's device of the plan.
        rank_of: device -> rank of its worker.
    """

    def __init__(
        self, card: AbstractCard, communicators: Sequence[Communicator], *, device: int, rank_of: Mapping[int, int]
    ) -> None:
        self._card, self._device, self._made = card, device, communicators
        self._route: dict[Pair, tuple[Line, int, CardStream]] = {}
        self._sums: dict[int, tuple[Line, CardStream]] = {}
        self._replicas: dict[tuple[int, ...], Line] = {}
        for made in communicators:
            line = card.communicator([rank_of[d] for d in made.devices], made.name)
            if line is None:
                continue
            for pair in made.pairs:
                if device in pair:
                    self._route[pair] = line, rank_of[pair[1] if device == pair[0] else pair[0]], card.stream()
            if made.replica:
                self._replicas[made.devices] = line
            if made.groups:
                self._sums |= dict.fromkeys(made.groups, (line, card.stream()))
        self._pending: deque[tuple[CardEvent, torch.Tensor]] = deque()
        self._finished: Mark = None

    def prepare(self, sizes: Mapping[Channel, RingSize]) -> None:
        """Send one message over each connection: the first one makes it, and both hosts wait meanwhile."""
        token = torch.zeros(1, dtype=torch.uint8, device=self._card.device)
        for _, pair in first_messages(self._made):
            if self._device in pair:
                line, peer, _ = self._route[pair]
                (line.send if pair[0] == self._device else line.receive)(token, peer).wait()
        for line in (*(line for line, _ in self._sums.values()), *self._replicas.values()):
            line.sum(token).wait()
        done = self._card.event()
        done.record()
        done.synchronize()

    def post(self, channel: Channel, form: Form) -> Receive:
        line, peer, side = self._route[channel[3], channel[4]]
        with self._card.use(side):
            buffer = form.empty()
            line.receive(buffer, peer).wait()
            arrived = self._card.event()
            arrived.record()
        return _CardArrival(self._card, arrived, buffer).wait

    def send(self, channel: Channel, tensor: torch.Tensor) -> None:
        line, peer, side = self._route[channel[3], channel[4]]
        # The communicator reads from the tensor's memory.
        self._pending.append((self._end(line.send(tensor, peer), side), tensor))
        while self._pending and self._pending[0][0].query():
            self._pending.popleft()

    def reduce(self, group: int, tensor: torch.Tensor) -> Handle:
        line, side = self._sums[group]
        return self._end(line.sum(tensor), side)

    def _end(self, work: CardWork, side: CardStream) -> CardEvent:
        """An event at the end of an operation, on a stream that waits for nothing else."""
        with self._card.use(side):
            work.wait()
            event = self._finished = self._card.event(timed=True)
            event.record()
        return event

    def sum_members(self, devices: tuple[int, ...], tensor: torch.Tensor) -> Handle:
        return self._replicas[devices].sum(tensor)

    def finished(self) -> Mark:
        return self._finished

    def flush(self, limit: int = 0) -> None:
        while len(self._pending) > limit:
            # The tensor goes after the wait, not before.
            self._pending[0][0].synchronize()
            self._pending.popleft()


@final
class _CardArrival:
    """A receive on a card: the current stream waits for it, and the memory of its buffer is kept for that stream."""

    def __init__(self, card: AbstractCard, arrived: CardEvent, buffer: torch.Tensor) -> None:
        self._card, self._arrived, self._buffer = card, arrived, buffer

    def wait(self) -> torch.Tensor:
        self._arrived.wait()
        self._card.keep(self._buffer)
        return self._buffer


@final
class StagedTransport(AbstractTransport):
    """Messages of workers that share a card, which NCCL refuses: through main memory, by a transport of its tensors.

    The host waits for the pass that made a message before it sends it, so the card does not run ahead of the host. This is for
    testing plans on one card, not for speed.

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
        receive, buffer = self._inner.post(channel, Form(form.shape, form.dtype)), form.empty()

        def arrived() -> torch.Tensor:
            self.upload(self._card.pinned(receive()), buffer)
            return buffer

        return arrived

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
