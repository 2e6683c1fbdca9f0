"""The contract of every data set; no torch until samples are loaded."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field

from gpp.errors import InvalidConfig
from gpp.models.base import AbstractModel

if TYPE_CHECKING:
    from torch import Tensor

SPLITS = ("train", "test")
HeldOut = Annotated[float, Field(gt=0, lt=1)]
"""The share of the samples for testing."""

TARGET = "target:"  # prefix of a target's name, so that a target may be called like an input


class Samples(ABC):
    """The samples of one split, by index."""

    in_memory: ClassVar[bool]
    """Whether rows are copied out of memory: one fetch per mini-batch is then cheaper than one per micro-batch."""

    @abstractmethod
    def __len__(self) -> int:
        """Number of samples."""

    @abstractmethod
    def fetch(self, indices: Sequence[int] | Tensor, names: Collection[str] | None = None) -> dict[str, Tensor]:
        """The named tensors of the samples at `indices`, on the CPU.

        Args:
            indices: B positions in 0 .. len - 1; a range of a mini-batch gives the same samples on every rank.
            names: input names and `target:NAME`; only these are read. None reads all.

        Returns:
            By name, [B, *spec.shape]: floats in the dtype asked of `load`, integers as int64, truths as bool.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class AbstractData(ABC):
    """A data set as its settings."""

    @abstractmethod
    def check(self, model: AbstractModel) -> None:
        """Refuse a model that this data set cannot feed, before any process starts.

        Raises:
            InvalidConfig: the model and the data do not match.
        """

    def warnings(self) -> tuple[str, ...]:
        """Warnings for the user about how this data set is split."""
        return ()

    @abstractmethod
    def load(self, split: str, model: AbstractModel, *, seed: int, dtype: str) -> Samples:
        """The samples of a split for a model's inputs and targets.

        Args:
            split: `train` or `test`.
            seed: seed of the run; equal seeds give equal samples.
            dtype: type of floats, as `float32`.
        """


def check_split(split: str) -> None:
    """Refuse anything but `train` and `test`.

    Raises:
        InvalidConfig: the split is neither.
    """
    if split not in SPLITS:
        raise InvalidConfig("split", split, f"must be one of {', '.join(SPLITS)}", "split=train")


def check_names(names: Collection[str] | None, known: Collection[str]) -> list[str]:
    """`names` in a fixed order; None gives all of `known`.

    Raises:
        InvalidConfig: a name is not known.
    """
    unknown = sorted(set(names or ()) - set(known))
    if unknown:
        fix = "name inputs as the model does, targets as target:NAME"
        raise InvalidConfig("names", unknown, f"the data set has {', '.join(known)}", fix)
    return [name for name in known if names is None or name in names]
