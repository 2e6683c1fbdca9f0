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

from tests.support.cards.hosts import AbstractHost
from tests.support.cards.operations import Memory, Queue

Key = tuple[torch.dtype, Sequence[int], Sequence[int], int]
"""Type, shape, strides and offset of a tensor."""

_UNKNOWN_TO_NUMPY = {torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2}


class _Array(np.ndarray):
    """An array that can be watched."""


@final
class Block:
    """The bytes of one storage.

    Args:
        host: the worker that it belongs to.
        memory: what the checks know of it.
        data: all of it, for kernels.
    """

    __slots__ = ("_tensors", "data", "host", "memory", "pinned")

    def __init__(self, host: AbstractHost, memory: Memory, data: torch.Tensor) -> None:
        self.host, self.memory, self.pinned = host, memory, memory.queue is None
        self.data = data
        self._tensors: dict[Key, torch.Tensor] = {(data.dtype, data.shape, data.stride(), 0): data}

    def tensor(self, key: Key) -> torch.Tensor:
        """A tensor over the bytes, for kernels."""
        found = self._tensors.get(key)
        if found is None:
            dtype, shape, stride, offset = key
            data = self.data
            if dtype is not data.dtype:
                data = torch.empty(0, dtype=torch.uint8).set_(data.untyped_storage()).view(dtype)
            found = self._tensors[key] = torch.as_strided(data, shape, stride, offset)
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
        """A tensor in fresh memory of a stream, or in pinned memory (None), and its block. Called without modes.

        The memory holds no numbers, or -1, as nobody may read it yet.
        """
        data = torch.empty_strided(shape, stride, dtype=dtype)
        data.fill_(float("nan") if dtype.is_floating_point else dtype.is_complex or -1)
        if dtype in _UNKNOWN_TO_NUMPY or 0 in shape:  # numpy forgets the strides of nothing
            array = torch.empty(0, dtype=torch.uint8).set_(data.untyped_storage()).numpy().view(_Array)
            tensor = torch.empty(0, dtype=dtype).set_(torch.from_numpy(array).untyped_storage(), 0, shape, stride)
        else:
            array = data.numpy().view(_Array)
            tensor = torch.from_numpy(array)
        storage = tensor.untyped_storage()
        block = Block(host, Memory(queue, name, storage.nbytes()), data)
        watch = _Watch(array, self._gone)
        watch.block, watch.number = block, storage._cdata
        self.of[watch.number] = block
        self._watches[watch.number] = watch
        return tensor, block

    def _gone(self, watch: weakref.ref[_Array]) -> None:
        assert isinstance(watch, _Watch)
        del self.of[watch.number]
        del self._watches[watch.number]
        watch.block.host.release(watch.block.memory)
