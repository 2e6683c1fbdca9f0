"""Messages between a program that trains step by step and its workers: a line of JSON, and tensors behind it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import nullcontext
from multiprocessing.connection import Connection
from typing import Any

import torch
from safetensors.torch import load, save

from gpp.runtime.cards.card import AbstractCard
from gpp.runtime.even import EvenOrder
from gpp.runtime.job import Settings
from gpp.runtime.worker.rows import Order, Pieces, Rows
from gpp.runtime.worker.stage import Fetch

ADDRESS, SECRET = "GPP_FEED", "GPP_FEED_SECRET"
"""Environment of a worker: the socket that its program listens at, and what tells it from any other process."""


def tell(to: Connection, head: Mapping[str, Any], tensors: Mapping[str, torch.Tensor] | None = None) -> None:
    """Send a message; tensors may be on any device."""
    body = save(_apart(tensors)) if tensors else b""
    to.send_bytes(json.dumps(head).encode() + b"\n" + body)


def _apart(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors in main memory, each in memory of its own: labels may be the inputs themselves, which safetensors refuses."""
    out: dict[str, torch.Tensor] = {}
    seen = set[int]()
    for name, tensor in tensors.items():
        own = tensor.detach().cpu().contiguous()
        place = own.untyped_storage().data_ptr()
        out[name] = own.clone() if place in seen else own
        seen.add(place)
    return out


def hear(from_: Connection) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The next message.

    Raises:
        EOFError: the other side is gone.
    """
    head, _, body = from_.recv_bytes().partition(b"\n")
    return json.loads(head), load(body) if body else {}


class Fed(Rows):
    """Rows that come with each step, in the order in which they come."""

    def __init__(self, settings: Settings, device: torch.device, card: AbstractCard | None = None) -> None:
        self._device = device
        self.loading = nullcontext
        self.batch: dict[str, torch.Tensor] = {}

    def fetch(self, split: str, size: int, order: Order, names: tuple[str, ...], pieces: Pieces | None = None) -> Fetch:
        def fetch(lo: int, hi: int) -> dict[str, torch.Tensor]:
            return {name: self.batch[name][lo:hi].to(self._device, non_blocking=True) for name in names}

        return fetch

    def evened(self, indices: torch.Tensor, even: EvenOrder) -> torch.Tensor:
        """They come in this order already (`gpp.app.pipeline`)."""
        return indices

    def ahead(self) -> None:
        """Nothing is known of the next step."""
