"""Rows of the data set for the stages of a worker."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from gpp.runtime.job import Settings, restore
from gpp.runtime.worker.stage import Fetch

if TYPE_CHECKING:
    from gpp.data.base import Samples

Order = Callable[[int], torch.Tensor]
"""Function that gives the indices of the samples of a mini-batch of the pass."""


class Rows:
    """The data set of a job, of which only the splits are loaded that somebody reads.

    Args:
        device: where rows are put.
    """

    def __init__(self, settings: Settings, device: torch.device) -> None:
        self._settings, self._device = settings, device
        # A model in memory has no settings; its data needs none.
        self._model, self._data = restore(settings.model) if settings.model else None, restore(settings.data)
        self._samples: dict[str, Samples] = {}

    def fetch(self, split: str, size: int, order: Order, names: tuple[str, ...]) -> Fetch:
        """Function (lo, hi) -> the named rows of those samples of a pass of mini-batches of `size` samples."""
        wanted = set(names)
        if wanted and split not in self._samples:
            settings = self._settings
            self._samples[split] = self._data.load(split, self._model, seed=settings.seed, dtype=settings.dtype)

        def rows(indices: torch.Tensor) -> dict[str, torch.Tensor]:
            found = self._samples[split].fetch(indices, wanted)
            if self._device.type == "cpu":
                return found
            return {name: tensor.to(self._device, non_blocking=True) for name, tensor in found.items()}

        whole = bool(wanted) and self._samples[split].in_memory
        # Rows in memory are fetched once for each mini-batch; forwards come in order, so one is enough to hold.
        held: tuple[int, torch.Tensor, dict[str, torch.Tensor]] | None = None

        def fetch(lo: int, hi: int) -> dict[str, torch.Tensor]:
            nonlocal held
            number = lo // size
            if held is None or held[0] != number:
                indices = order(number)
                held = number, indices, rows(indices) if whole else {}
            lo, hi = lo - number * size, hi - number * size
            return {name: tensor[lo:hi] for name, tensor in held[2].items()} if whole else rows(held[1][lo:hi])

        return fetch
