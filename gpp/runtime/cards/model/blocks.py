"""Memory under tensors: which storages lie on a card, when their last references go, and the bytes for the kernels.

A storage that the program holds wraps a numpy array that can be watched; it goes when the last reference to the storage
does, autograd's own included. The kernels use other tensors over the same bytes, so they never keep a storage alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import final

import numpy as np
import torch

from gpp.runtime.cards.model.hosts import AbstractHost
from gpp.runtime.cards.model.operations import Memory, Queue

Key = tuple[torch.dtype, Sequence[int], Sequence[int], int]
"""Type, shape, strides and offset of a tensor."""

POISON = 0xFF
"""What fresh memory holds: not a number in every float type, and no index."""


class _Array(np.ndarray):
    """An array that can be watched."""


@final
class Block:
    """The bytes of one storage.

    Args:
        host: the worker that it belongs to.
        memory: what the checks know of it.
        pinned: whether it is main memory.
    """

    __slots__ = ("_bytes", "_tensors", "host", "memory", "pinned")

    def __init__(self, host: AbstractHost, memory: Memory, data: torch.Tensor, *, pinned: bool) -> None:
        self.host, self.memory, self.pinned = host, memory, pinned
        self._bytes = data
        self._tensors: dict[Key, torch.Tensor] = {}

    def tensor(self, key: Key) -> torch.Tensor:
        """A tensor over the bytes, for kernels."""
        found = self._tensors.get(key)
        if found is None:
            dtype, shape, stride, offset = key
            found = self._tensors[key] = torch.as_strided(self._bytes.view(dtype), shape, stride, offset)
        return found


class _Watch(weakref.ref[_Array]):
    __slots__ = ("block", "number")
    block: Block
    number: int


@final
class Blocks:
    """All storages on the cards of one process."""

    def __init__(self) -> None:
        self.of: dict[int, Block] = {}
        """Address of a storage's implementation -> its block."""
        self._watches: dict[int, _Watch] = {}

    def find(self, tensor: torch.Tensor) -> Block | None:
        """The block that a tensor lies in; None for ordinary main memory."""
        return self.of.get(tensor.untyped_storage()._cdata)

    def make(
        self, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, host: AbstractHost, queue: Queue | None, name: str
    ) -> tuple[torch.Tensor, Block]:
        """A tensor in fresh memory of a stream, or in pinned memory (None), and its block. Called without modes."""
        num_bytes = dtype.itemsize
        for size, step in zip(shape, stride, strict=True):
            num_bytes = 0 if not size or not num_bytes else num_bytes + (size - 1) * step * dtype.itemsize
        data = torch.empty(num_bytes, dtype=torch.uint8).fill_(POISON)
        array = data.numpy().view(_Array)
        storage = torch.from_numpy(array).untyped_storage()
        block = Block(host, Memory(queue, name, num_bytes), data, pinned=queue is None)
        watch = _Watch(array, self._gone)
        watch.block, watch.number = block, storage._cdata
        self.of[watch.number] = block
        self._watches[watch.number] = watch
        return torch.empty(0, dtype=dtype).set_(storage, 0, shape, stride), block

    def _gone(self, watch: weakref.ref[_Array]) -> None:
        assert isinstance(watch, _Watch)
        del self.of[watch.number]
        del self._watches[watch.number]
        watch.block.host.release(watch.block.memory)
