"""Rows of the data set for the stages of a worker."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import accumulate
from typing import TypeAlias

import torch

from gpp.data.base import Samples
from gpp.data.sampler import epoch_order, position
from gpp.runtime.cards.card import AbstractCard, CardEvent
from gpp.runtime.even import EvenOrder
from gpp.runtime.job import Settings, restore
from gpp.runtime.worker.stage import Fetch

Order = Callable[[int], torch.Tensor]
"""Function that gives the indices of the samples of a mini-batch of the pass."""

Pieces = tuple[tuple[int, int], ...]
"""Samples [lo, hi) of a mini-batch, in order."""

Gathered: TypeAlias = "tuple[torch.Tensor, _RowsOnTheWay | dict[str, torch.Tensor]]"
"""The indices of a mini-batch, and its rows."""


KEPT_ORDERS = 4
"""Mini-batches whose order is kept: the one that is run, the next, and as many of a pipeline that does not drain."""


@lru_cache(maxsize=2)
def _epoch(num_samples: int, seed: int, epoch: int) -> torch.Tensor:
    return torch.from_numpy(epoch_order(num_samples, seed, epoch).copy())


def minibatch_indices(step: int, minibatch_size: int, num_samples: int, seed: int) -> torch.Tensor:
    """The sample indices of a step, those of `gpp.data.sampler.minibatch`: [minibatch_size], int64."""
    epoch, start = position(step, minibatch_size, num_samples)
    return _epoch(num_samples, seed, epoch)[start : start + minibatch_size]


class Rows:
    """The data set of a job, of which only the splits are loaded that somebody reads.

    Of rows that are in memory, a replica gathers those of its own samples of a mini-batch at once, and `ahead` does so for the next
    one while the worker has nothing else to do. On a card they travel from pinned memory on a stream of their own, while the card
    computes.

    Args:
        device: where rows are put.

    A data set is loaded inside `loading()`.
    """

    def __init__(self, settings: Settings, device: torch.device, card: AbstractCard | None = None) -> None:
        self._settings, self._device, self._card = settings, device, card
        # A model in memory has no settings; its data needs none.
        self._model, self._data = restore(settings.model) if settings.model else None, restore(settings.data)
        self._samples: dict[str, Samples] = {}
        self.loading: Callable[[], AbstractContextManager[object]] = nullcontext
        self._copies = card.stream() if card else None
        self._next: dict[tuple[str, Pieces, frozenset[str]], Callable[[], Gathered]] = {}
        self._prepared: dict[tuple[str, Pieces, frozenset[str]], Gathered] = {}
        self._copied: deque[_RowsOnTheWay] = deque()
        self._orders: dict[tuple[int, ...], torch.Tensor] = {}

    def fetch(self, split: str, size: int, order: Order, names: tuple[str, ...], pieces: Pieces | None = None) -> Fetch:
        """Function (lo, hi) -> the named rows, each [hi - lo, ...], of a pass of mini-batches of `size` samples.

        Args:
            pieces: the samples [lo, hi) of a mini-batch that are asked for, in order; None for all at once. Others are fetched when
                they are asked for.
        """
        pieces = pieces or ((0, size),)
        places = dict(zip(pieces, accumulate((hi - lo for lo, hi in pieces), initial=0), strict=False))
        own = None if pieces == ((0, size),) else torch.cat([torch.arange(lo, hi) for lo, hi in pieces])
        wanted = set(names)
        if wanted:
            # A column may be made when a row of it is first asked for.
            self._loaded(split, wanted)

        def rows(indices: torch.Tensor) -> dict[str, torch.Tensor]:
            found = self._samples[split].fetch(indices, wanted)
            if self._device.type == "cpu":
                return found
            return {name: tensor.to(self._device, non_blocking=True) for name, tensor in found.items()}

        def prepare(number: int) -> Gathered:
            indices = order(number)
            found = self._samples[split].fetch(indices if own is None else indices[own], wanted)
            return indices, self._send(found) if self._card else found

        def prepared(number: int) -> dict[str, torch.Tensor]:
            indices, found = self._prepared.pop(key, None) or prepare(number)
            if not torch.equal(indices, order(number)):  # the run went on elsewhere
                _, found = prepare(number)
            self._next[key] = partial(prepare, number + 1)
            return self._receive(found) if isinstance(found, _RowsOnTheWay) else found

        key = (split, pieces, frozenset(wanted))
        whole = bool(wanted) and (self._card is not None or self._samples[split].in_memory)
        # The rows of a mini-batch are fetched once; forwards come in order, so one is enough to hold.
        held: tuple[int, torch.Tensor, dict[str, torch.Tensor]] | None = None

        def fetch(lo: int, hi: int) -> dict[str, torch.Tensor]:
            nonlocal held
            number = lo // size
            if held is None or held[0] != number:
                held = (number, torch.empty(0), prepared(number)) if whole else (number, order(number), {})
            lo, hi = lo - number * size, hi - number * size
            if not whole:
                return rows(held[1][lo:hi])
            if own is not None:
                if (lo, hi) not in places:
                    return rows(order(number)[lo:hi])
                lo, hi = (at := places[lo, hi]), at + hi - lo
            return {name: tensor[lo:hi] for name, tensor in held[2].items()}

        return fetch

    def _loaded(self, split: str, names: set[str]) -> Samples:
        """The samples of a split, of which these columns are there."""
        with self.loading():
            if split not in self._samples:
                settings = self._settings
                self._samples[split] = self._data.load(split, self._model, seed=settings.seed, dtype=settings.dtype)
            self._samples[split].fetch(torch.zeros(1, dtype=torch.int64), names)
        return self._samples[split]

    def evened(self, indices: torch.Tensor, even: EvenOrder) -> torch.Tensor:
        """The samples of a mini-batch of the training in the order that makes micro-batches even."""
        assert even.amount
        key = tuple(indices.tolist())
        if key not in self._orders:
            masks = self._loaded("train", {even.amount}).fetch(indices, {even.amount})[even.amount]
            self._orders[key] = indices[torch.from_numpy(even.of(masks))]
            while len(self._orders) > KEPT_ORDERS:
                self._orders.pop(next(iter(self._orders)))
        return self._orders[key]

    def ahead(self) -> None:
        """Prepare the next mini-batch's rows; they wait until they are fetched. With a card, their copy to it begins."""
        for key in [key for key in self._next if key not in self._prepared]:
            self._prepared[key] = self._next.pop(key)()

    def forget(self) -> None:
        """Forget what is prepared and how the next is: another worker goes on, with other samples, and its own order."""
        self._next.clear()
        self._prepared.clear()

    def _send(self, found: dict[str, torch.Tensor]) -> _RowsOnTheWay:
        assert self._card and self._copies
        while self._copied and self._copied[0].done.query():
            self._copied.popleft()
        pinned = {name: self._card.pinned(tensor) for name, tensor in found.items()}
        with self._card.use(self._copies):
            rows = {name: self._card.upload(tensor) for name, tensor in pinned.items()}
            done = self._card.event()
            done.record()
        sent = _RowsOnTheWay(pinned, rows, done)
        # The copies read from pinned memory until they are done.
        self._copied.append(sent)
        return sent

    def _receive(self, sent: _RowsOnTheWay) -> dict[str, torch.Tensor]:
        assert self._card
        sent.done.wait()
        rows, sent.rows = sent.rows, {}
        for tensor in rows.values():
            self._card.keep(tensor)
        return rows


@dataclass(slots=True)
class _RowsOnTheWay:
    """Rows of data on their way to a card."""

    pinned: dict[str, torch.Tensor]
    rows: dict[str, torch.Tensor]
    done: CardEvent
