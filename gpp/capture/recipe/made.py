"""Initial tensors by a recipe: those that are wanted, one after the other, and nothing else for longer than it is needed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import cache
from math import prod
from typing import Any, final

import torch
from torch import Tensor

from gpp.capture.codec import called, default_dtype, dtype_of, operator_of
from gpp.capture.recipe.generator import skip
from gpp.capture.recipe.value import NORMAL, UNIFORM, Recipe, Step, StorageView, needed
from gpp.errors import CaptureError

BLOCK = 16
"""From so many elements on torch draws normal numbers in blocks of so many; those of a last, smaller block are drawn again."""


def made(recipe: Recipe, names: Collection[str], given: Callable[[int], Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The named tensors, each as soon as it is whole: equal to those of the whole model, bit for bit.

    A tensor is freed when the next one is asked for, if nothing else depends on it. Torch's generator must be left alone meanwhile,
    and has its state again at the end.

    Args:
        given: number of a storage that no call makes -> its bytes.

    Raises:
        CaptureError: this version of torch makes other tensors than the one that recorded.
    """
    places = needed(recipe, names)
    with kept_generator(), default_dtype(recipe.dtype), torch.no_grad():
        torch.manual_seed(recipe.seed)
        yield from _Making(recipe, names, places, given).run()


@final
class _Making:
    """The storages that are held while the steps are carried out, and the numbers that are still to be left out."""

    def __init__(self, recipe: Recipe, names: Collection[str], places: Collection[int], given: Callable[[int], Tensor]) -> None:
        self._recipe, self._places, self._given = recipe, frozenset(places), given
        self._held: dict[int, Any] = {}
        self._owed = 0
        used, written = dict[int, int](), dict[int, int]()
        for place in sorted(places):
            step = recipe.steps[place]
            begun = [view.storage for _, view in step.makes]
            used |= dict.fromkeys([*begun, *(view.storage for view in step.reads)], place)
            written |= dict.fromkeys([*begun, *step.writes], place)
        self._whole = defaultdict[int, list[str]](list)
        """Place of the last call that changes a tensor's storage -> the tensors; -1 where there is none."""
        for name in names:
            self._whole[written.get(recipe.tensors[name].storage, -1)].append(name)
        self._freed = defaultdict[int, list[int]](list)
        for storage, place in used.items():
            self._freed[place].append(storage)

    def run(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._tensors(-1)
        last = max(self._places, default=-1)
        for place, step in enumerate(self._recipe.steps[: last + 1]):
            if place in self._places:
                self._call(step)
                yield from self._tensors(place)
                for storage in self._freed[place]:
                    del self._held[storage]
            elif step.draws:
                self._leave_out(step)

    def _tensors(self, place: int) -> Iterator[tuple[str, Tensor]]:
        for name in self._whole[place]:
            yield name, self._tensor(self._recipe.tensors[name])

    def _tensor(self, view: StorageView) -> Tensor:
        if view.storage not in self._held:
            if view.storage not in self._recipe.given:
                raise CaptureError(f"the recipe's storage {view.storage} is made by no call. Fix: give the same command again")
            self._held[view.storage] = self._given(view.storage).untyped_storage()
        empty = torch.empty(0, dtype=dtype_of(view.dtype))
        return empty.set_(self._held[view.storage], view.offset, view.shape, view.stride)  # type: ignore[call-overload]

    def _call(self, step: Step) -> None:
        if step.draws:
            self._settle()
        results = _called(step, [self._tensor(view) for view in step.reads])
        for place, view in step.makes:
            tensor = results[place]
            found = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tensor.stride(), tensor.storage_offset()
            if found != (view.dtype, view.shape, view.stride, view.offset):
                fix = "set initial_weights=whole, or use the version of torch that recorded"
                raise CaptureError(f"{step.target} makes a tensor {found}, and was recorded with {view}. Fix: {fix}")
            self._held[view.storage] = tensor.untyped_storage()

    def _leave_out(self, step: Step) -> None:
        count = numbers_of(step)
        if count is not None:
            self._owed += count
            return
        self._settle()
        _called(step, [torch.empty_strided(view.shape, view.stride, dtype=dtype_of(view.dtype)) for view in step.reads])

    def _settle(self) -> None:
        skip(self._owed)
        self._owed = 0


def _called(step: Step, reads: list[Tensor]) -> list[Any]:
    result = called(step, lambda number: reads[int(number)], 0)
    return list(result) if isinstance(result, tuple | list) else [result]


def numbers_of(step: Step) -> int | None:
    """The 32-bit numbers that a call takes from the generator; None where that is only known when it is carried out."""
    if step.target not in (NORMAL, UNIFORM):
        return None
    view = step.reads[0]
    size = prod(view.shape)
    contiguous = torch.empty_strided(view.shape, view.stride, device="meta").is_contiguous()
    if size < BLOCK or not contiguous or not _as_counted(step.target, view.dtype):
        return None
    return _count(step.target, view.dtype, size)


def _count(target: str, dtype: str, size: int) -> int:
    again = BLOCK if target == NORMAL and size % BLOCK else 0
    return (size + again) * (2 if dtype == "float64" else 1)


@cache
def _as_counted(target: str, dtype: str) -> bool:
    """Whether this torch takes as many numbers as `_count` says, tried on three sizes."""
    for size in (BLOCK, 2 * BLOCK, 3 * BLOCK - 5):
        states = []
        with kept_generator():
            torch.manual_seed(0)
            operator_of(target)(torch.empty(size, dtype=dtype_of(dtype)))
            states.append(torch.get_rng_state())
            torch.manual_seed(0)
            skip(_count(target, dtype, size))
            states.append(torch.get_rng_state())
        if not torch.equal(*states):
            return False
    return True


@contextmanager
def kept_generator() -> Iterator[None]:
    """Leave torch's generator as it is found."""
    state = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(state)
