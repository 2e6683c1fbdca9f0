"""How the initial tensors of a model come about, as plain data: calls of torch in order, without their numbers.

Storages are numbered in the order in which they appear; a tensor is a view of one, so views need no calls.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

NORMAL, UNIFORM = "aten.normal_.default", "aten.uniform_.default"

COVERING = frozenset({NORMAL, UNIFORM, "aten.zero_.default", "aten.fill_.Scalar", "aten.fill_.Tensor", "aten.copy_.default"})
"""Operators that replace every element of their first argument whatever it was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageView:
    """A tensor as a part of a storage.

    Args:
        storage: its number.
        shape, stride, offset: in elements.
    """

    storage: int
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One call.

    Args:
        target: operator.
        args, kwargs: as `gpp.capture.codec` encodes them; `{"ref": "3"}` is the fourth of `reads`.
        reads: the tensors among the arguments.
        writes: numbers of the storages that it changes.
        covers: whether it replaces all that is in the one storage that it changes.
        makes: results with a storage that begins here, each with its place among the results.
        draws: whether it draws random numbers.
    """

    target: str
    args: list[Any]
    kwargs: dict[str, Any]
    reads: tuple[StorageView, ...] = ()
    writes: tuple[int, ...] = ()
    covers: bool = False
    makes: tuple[tuple[int, StorageView], ...] = ()
    draws: bool = False

    @property
    def counts(self) -> bool:
        """Whether it draws so many numbers as no other call decides, so that it may be left out."""
        return not self.reads or self.target in COVERING


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """The initial tensors of a model as the calls that make them.

    Args:
        seed: of torch's generator before the first call.
        dtype: the default floating-point type meanwhile.
        tensors: full name -> tensor.
        given: storages that no call makes; their bytes stand beside the recipe.
    """

    seed: int
    dtype: str
    steps: tuple[Step, ...]
    tensors: dict[str, StorageView]
    given: tuple[int, ...] = ()


def needed(recipe: Recipe, names: Collection[str]) -> list[int]:
    """The places of the steps that these tensors depend on, the last one first."""
    content = {recipe.tensors[name].storage for name in names}
    covered: set[int] = set()
    """Storages all of whose content comes later: of earlier calls only the one is needed with which they begin."""
    places: list[int] = []
    for place in range(len(recipe.steps) - 1, -1, -1):
        step = recipe.steps[place]
        begun = {view.storage for _, view in step.makes}
        decides = step.draws and not step.counts
        if not (decides or content & {*begun, *step.writes} or covered & begun):
            continue
        replaced = {*step.writes} & content if step.covers else set[int]()
        content = content - begun - replaced | {view.storage for view in step.reads} - replaced
        covered = (covered | replaced) - begun - content
        places.append(place)
    return places
