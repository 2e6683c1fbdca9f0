"""Storages between forward and backward: their places, the tensors on them, and who has made them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from gpp.runtime.memory.marks import KEPT

Key = tuple[int, int]
"""Place of the node that makes a storage, and the storage's number among those of that node."""


class Again(Protocol):
    """What makes discarded storages again."""

    def again(self) -> None:
        """Fill the slots that are still wanted."""


class Slot:
    """The place of a storage between forward and backward; `run` makes it again where it is empty."""

    __slots__ = ("__weakref__", "run", "storage")

    def __init__(self, storage: torch.UntypedStorage | None, run: Again | None) -> None:
        self.storage, self.run = storage, run


class View:
    """In place of a tensor on a slot's storage."""

    __slots__ = ("dtype", "offset", "size", "slot", "stride")

    def __init__(self, slot: Slot, tensor: Tensor) -> None:
        self.slot, self.dtype, self.size, self.stride = slot, tensor.dtype, tensor.size(), tensor.stride()
        self.offset = int(tensor.storage_offset())

    def tensor(self) -> Tensor:
        """The tensor; its run is called again if the slot is empty."""
        slot = self.slot
        if slot.storage is None:
            assert slot.run is not None, "a copy has not come back"
            slot.run.again()
        storage = slot.storage
        if storage is None:
            raise RuntimeError("a discarded storage was not made again: its operator did something else the second time")
        with torch.no_grad():
            return torch.empty(0, dtype=self.dtype, device=storage.device).set_(storage, self.offset, self.size, self.stride)


class Held:
    """A value that a run reads, until the run is called again."""

    __slots__ = ("differentiable", "value")

    def __init__(self, value: Tensor | View, differentiable: bool) -> None:
        self.value, self.differentiable = value, differentiable

    def tensor(self) -> Tensor:
        tensor = self.value.tensor() if isinstance(self.value, View) else self.value
        return tensor.detach().requires_grad_(self.differentiable)


class Made:
    """A storage of the pass under way."""

    __slots__ = ("key", "reference", "slot", "way")

    def __init__(self, storage: torch.UntypedStorage, way: int, key: Key) -> None:
        # As long as a weak reference is there, no other storage can have this one's place.
        self.reference, self.way, self.key = StorageWeakRef(storage), way, key
        self.slot: Slot | None = None


def held(value: Any, of: Callable[[Tensor], Held]) -> Any:
    """A node's value with its tensors held."""
    if isinstance(value, (tuple, list)):
        return tuple(held(part, of) for part in value)
    return of(value) if isinstance(value, Tensor) else value


def given(value: Any) -> Any:
    """The value again."""
    if isinstance(value, tuple):
        return tuple(given(part) for part in value)
    return value.tensor() if isinstance(value, Held) else value


def plain(tensor: Tensor) -> bool:
    """Whether a tensor is told by storage, type, size, strides and offset."""
    return tensor.layout is torch.strided and not tensor.is_conj() and not tensor.is_neg()


class Watch:
    """Follows the storages of a pass: those that a node makes, and those of others, which are registered as nobody's."""

    def __init__(self) -> None:
        self.place = 0
        self.known: dict[int, Made] = {}
        self._counts: dict[int, int] = {}

    def others(self, tensors: Sequence[Any]) -> None:
        """Storages that none of the pass's nodes make."""
        for tensor in tensors:
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self.known[storage._cdata] = Made(storage, KEPT, (-1, 0))
            elif isinstance(tensor, tuple):
                self.others(tensor)

    def register(self, storage: torch.UntypedStorage, way: int, place: int) -> Made:
        """A storage that nobody has seen before."""
        number = self._counts.get(place, 0)
        self._counts[place] = number + 1
        made = self.known[storage._cdata] = Made(storage, way, (place, number))
        return made

    def note(self, value: Any, way: int, place: int) -> None:
        """The storages of a node's value."""
        if isinstance(value, Tensor):
            if plain(value):
                storage = value.untyped_storage()
                if storage._cdata not in self.known:
                    self.register(storage, way, place)
        elif isinstance(value, (tuple, list)):
            for part in value:
                self.note(part, way, place)
