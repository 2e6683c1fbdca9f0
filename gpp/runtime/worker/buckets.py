"""Sums of gradients that overlap with the backward that completes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import final

import torch

BUCKET_BYTES = 25 * 2**20
"""Gradients that are summed at once, about: as many as DistributedDataParallel sums."""


@final
class Buckets:
    """Parts of one buffer of gradients, each summed as soon as autograd has added to all of its parameters.

    All members of a group have the same parts and begin their sums in the same order, the last part first: a backward
    comes to the last parameters first.

    Args:
        params: the parameters whose gradients lie in the buffer, in its order.
        begin: starts the sum of a part of the buffer.
    """

    def __init__(
        self, params: Sequence[torch.nn.Parameter], flat: torch.Tensor, begin: Callable[[torch.Tensor], None], num_bytes: int
    ) -> None:
        self._begin = begin
        self._parts: list[torch.Tensor] = []
        self._sizes: list[int] = []
        end = at = flat.numel()
        members = 0
        for param in reversed(params):
            param.register_post_accumulate_grad_hook(partial(self._added, len(self._parts)))
            at, members = at - param.numel(), members + 1
            if not at or (end - at) * flat.element_size() >= num_bytes:
                self._parts.append(flat[at:end])
                self._sizes.append(members)
                end, members = at, 0
        self._missing: list[int] = []
        self._next = 0

    def arm(self) -> None:
        """Announce that the next backward is the last that adds to these gradients."""
        self._missing, self._next = list(self._sizes), 0

    def finish(self) -> None:
        """Begin the sums that are left: of parameters to which the backward has not added."""
        for part in self._parts[self._next :]:
            self._begin(part)
        self._missing, self._next = [], 0

    def _added(self, part: int, param: torch.Tensor) -> None:
        if self._missing:
            self._missing[part] -= 1
            while self._next < len(self._parts) and not self._missing[self._next]:
                self._begin(self._parts[self._next])
                self._next += 1
