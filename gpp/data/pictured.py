"""Made-up samples of which each has some of the things that a mask tells: 0 to 8 pictures of a text."""

from __future__ import annotations

from typing import final

import numpy as np

from gpp.data.base import AbstractData, Samples, check_split
from gpp.data.synthetic import Synthetic
from gpp.errors import InvalidConfig
from gpp.models.base import AbstractModel
from gpp.settings import Count, settings


@final
@settings("data")
class Pictured(AbstractData):
    """`data=synthetic`, with masks [places] of which a sample's first ones are true: every number from 0 to `places` is as likely.

    Args:
        mask: the model's input, of one dimension.
        num_samples, num_test_samples: sizes of the two splits.
    """

    mask: str = "there"
    num_samples: Count = 4096
    num_test_samples: Count = 256

    def check(self, model: AbstractModel) -> None:
        spec = model.inputs().get(self.mask)
        if spec is None or spec.dtype != "bool" or len(spec.shape) != 1:
            rule = f"must be an input of booleans of one dimension, and model={model.name} has {', '.join(model.inputs())}"
            raise InvalidConfig("data.mask", self.mask, rule, "model=pictured_small, or data=synthetic, which fits every model")

    def load(self, split: str, model: AbstractModel, *, seed: int, dtype: str) -> Samples:
        from gpp.data.samples import ColumnSamples

        check_split(split)
        self.check(model)
        plain = Synthetic(num_samples=self.num_samples, num_test_samples=self.num_test_samples)
        columns, count = plain.columns(split, model, seed), plain.count(split)
        columns[self.mask] = lambda: self._masks(split, count, model.inputs()[self.mask].shape[0], seed)
        return ColumnSamples(count, columns, dtype)

    def _masks(self, split: str, count: int, places: int, seed: int) -> np.ndarray:
        """[count, places], bool."""
        random = np.random.default_rng([seed, 1 if split == "train" else 2])
        return np.arange(places) < random.integers(0, places + 1, count)[:, None]
