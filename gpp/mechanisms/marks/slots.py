"""Storages between forward and backward: their places, the tensors on them, and who has made them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gpp.mechanisms.marks.nodes import KEPT
from gpp.runtime.worker.stage import on_storage

Key = tuple[int, int]
"""Place of the node that makes a storage, and the storage's number among those of that node."""


class Slot:
    """The place of a storage between forward and backward, with some tensor on it; `again` fills it where it is empty."""

    __slots__ = ("__weakref__", "again", "base")

    def __init__(self, base: Tensor | None, again: Callable[[], None] | None) -> None:
        self.base, self.again = base, again


class View:
    """In place of a tensor on a slot's storage."""

    __slots__ = ("dtype", "offset", "size", "slot", "stride")

    def __init__(self, slot: Slot, tensor: Tensor) -> None:
        self.slot, self.dtype, self.size, self.stride = slot, tensor.dtype, tensor.size(), tensor.stride()
        self.offset = int(tensor.storage_offset())

    def tensor(self) -> Tensor:
        """The tensor; its run is called again if the slot is empty."""
        slot = self.slot
        if slot.base is None:
            assert slot.again is not None, "a copy has not come back"
            slot.again()
        base = slot.base
        if base is None:
            raise RuntimeError("a discarded storage was not made again: its operator did something else the second time")
        if base.dtype is self.dtype:
            return base.as_strided(self.size, self.stride, self.offset)
        return on_storage(base.untyped_storage(), self.dtype, self.size, self.stride, self.offset)


def flat(base: Tensor) -> Tensor:
    """All of the storage that a tensor lies on, in its type."""
    num_bytes = base.untyped_storage().nbytes()
    if num_bytes % base.element_size():
        return on_storage(base.untyped_storage(), torch.uint8, (num_bytes,), (1,), 0)
    return base.as_strided((num_bytes // base.element_size(),), (1,), 0)


class ReadValue:
    """A value that a run reads, until the run is called again."""

    __slots__ = ("differentiable", "value")

    def __init__(self, value: Tensor | View, differentiable: bool) -> None:
        self.value, self.differentiable = value, differentiable

    def tensor(self) -> Tensor:
        tensor = self.value.tensor() if isinstance(self.value, View) else self.value
        return tensor.detach().requires_grad_(self.differentiable)


class Made:
    """A storage of the pass under way that does not stay; `slot` is made when somebody wants it."""

    __slots__ = ("key", "slot", "way")

    def __init__(self, way: int, key: Key) -> None:
        self.way, self.key = way, key
        self.slot: Slot | None = None


STAYS = Made(KEPT, (-1, 0))
"""Any storage that stays."""


def held(value: Any, of: Callable[[Tensor], ReadValue]) -> Any:
    """A node's value with its tensors held."""
    if isinstance(value, (tuple, list)):
        return tuple(held(part, of) for part in value)
    return of(value) if isinstance(value, Tensor) else value


def given(value: Any) -> Any:
    """The value again."""
    if isinstance(value, tuple):
        return tuple(given(part) for part in value)
    return value.tensor() if isinstance(value, ReadValue) else value


def told(tensor: Tensor) -> bool:
    """Whether storage, type, size, strides and offset are all that there is to a tensor with a storage."""
    return not tensor.is_conj() and not tensor.is_neg()


class Watch:
    """Follows the storages of a pass: those that a node makes, and those of others, which stay.

    Args:
        ways: of each place.
    """

    def __init__(self, ways: Sequence[int]) -> None:
        self.place = 0
        # Behind the last node nothing is made that does not stay.
        self.ways = (*ways, KEPT)
        self.known: dict[int, Made] = {}
        # As long as there is a weak reference to a storage, no other one can have its place.
        self._references: list[Any] = []
        self._counts: dict[int, int] = {}

    def others(self, tensors: Sequence[Any]) -> None:
        """Storages that none of the pass's nodes make, and that live as long as the pass."""
        for tensor in tensors:
            if isinstance(tensor, Tensor):
                self.known[tensor.untyped_storage()._cdata] = STAYS
            elif isinstance(tensor, tuple):
                self.others(tensor)

    def register(self, storage: torch.UntypedStorage, tensor: Tensor, place: int) -> Made:
        """A storage that nobody has seen before, and a tensor on it."""
        reference: Any = storage._weak_ref()
        self._references.append(reference)
        made, way = STAYS, self.ways[place]
        if way != KEPT:
            number = self._counts.get(place, 0)
            self._counts[place] = number + 1
            made = Made(way, (place, number))
        self.known[storage._cdata] = made
        return made

    def note(self, value: Any, place: int) -> None:
        """The storages of a node's value."""
        if isinstance(value, Tensor):
            if value.layout is torch.strided:
                storage = value.untyped_storage()
                if storage._cdata not in self.known:
                    self.register(storage, value, place)
        elif isinstance(value, (tuple, list)):
            for part in value:
                self.note(part, place)

    def forget(self) -> None:
        """The pass is over."""
        for reference in self._references:
            torch.UntypedStorage._free_weak_ref(reference)
        self._references, self.known = [], {}
