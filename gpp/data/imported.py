"""A data set of the user's own, or of any library, named by the dotted path of its factory."""

from __future__ import annotations

from typing import Any, final

import numpy as np

from gpp.data.base import AbstractData, HeldOut, Samples, check_split
from gpp.errors import InvalidConfig
from gpp.models.base import AbstractModel
from gpp.models.dotted import call, check_dotted, origin, users_code
from gpp.settings import settings


@final
@settings("data")
class ImportedData(AbstractData):
    """`factory(**args, **train_args)` for training, `factory(**args, **test_args)` for testing.

    Without arguments that tell the two apart they would be one data set. Then a fixed random part of it, the same for
    every seed, is held out from training for testing.

    The factory returns a map-style torch Dataset whose items are `(inputs, targets)` or one dict of both.
    Each of `inputs` and `targets` is a dict by the model's names, a tuple in the model's order, or, when there
    is only one, the value itself.

    Args:
        factory: dotted path of a class or function.
        args, train_args, test_args: keyword arguments of the factory; null for none.
        test_fraction: share of the samples held out, where `train_args` and `test_args` are the same.
    """

    factory: str
    args: dict[str, Any] | None = None
    train_args: dict[str, Any] | None = None
    test_args: dict[str, Any] | None = None
    test_fraction: HeldOut = 0.1

    def __post_init__(self) -> None:
        check_dotted(self.factory, field="data.factory")
        for name in ("train_args", "test_args"):
            twice = sorted(set(self.args or {}) & set(getattr(self, name) or {}))
            if twice:
                raise InvalidConfig(f"data.{name}", twice, "are in data.args, too", "give each argument once")

    @property
    def _is_split(self) -> bool:
        """Whether the factory is asked for two data sets."""
        return (self.train_args or {}) != (self.test_args or {})

    def check(self, model: AbstractModel) -> None:
        origin(self.factory, field="data.factory")

    def warnings(self) -> tuple[str, ...]:
        if self._is_split:
            return ()
        return (
            f"data.factory={self.factory} makes one data set: {self.test_fraction:g} of its samples (data.test_fraction), drawn "
            "once and for all, are held out from training. data.train_args and data.test_args name splits of its own",
        )

    def load(self, split: str, model: AbstractModel, *, seed: int, dtype: str) -> Samples:
        from gpp.data.samples import DatasetSamples

        check_split(split)
        named = (self.args or {}) | ((self.train_args if split == "train" else self.test_args) or {})
        dataset = call(self.factory, (), named, field="data.factory", arguments="data.args")
        if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
            raise InvalidConfig("data.factory", self.factory, "must return a map-style Dataset", "give it __len__ and __getitem__")
        with users_code("data.factory", self.factory):
            count = len(dataset)
        rows = range(count) if self._is_split else self._rows(split, count)
        return DatasetSamples(dataset, model, dtype, rows)

    def _rows(self, split: str, count: int) -> list[int]:
        """The samples of one split of a single data set, in their order there.

        Raises:
            InvalidConfig: there are too few samples for two splits.
        """
        if count < 2:
            raise InvalidConfig("data.factory", self.factory, f"makes {count} samples, and one is held out", "give it more samples")
        held_out = min(count - 1, max(1, round(count * self.test_fraction)))
        order = np.random.default_rng(0).permutation(count)
        return sorted((order[:held_out] if split == "test" else order[held_out:]).tolist())


Imported = ImportedData  # the name in files of earlier versions
