"""Made-up samples of any model's shapes that a model can learn from.

Every sample has a hidden vector z. Inputs are z seen through a random projection, with noise; targets are
linear in z. So the loss falls for any model that can find z, and no file is needed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import final
from zlib import crc32

import numpy as np

from gpp.data.base import TARGET, AbstractData, Samples, check_split
from gpp.models.base import AbstractModel, TensorSpec
from gpp.settings import Count, NotNegative, settings

NUM_HIDDEN = 8  # length of z
MAX_CLASSES = 16  # classes that occur among the targets; a vocabulary of 50 000 could not be learned from 1000 samples
BLOCK = 1 << 15  # elements of a product that are summed at a time, so that they stay in the cache


@final
@settings("data")
class Synthetic(AbstractData):
    """Sample i is a function of seed, split and i alone, whatever the number of samples, ranks or micro-batches.

    It is the same to the last bit on every processor and with any number of threads.

    Args:
        num_samples, num_test_samples: sizes of the two splits.
        noise: standard deviation of the noise on float inputs, beside a signal of 1.
    """

    num_samples: Count = 1024
    num_test_samples: Count = 256
    noise: NotNegative = 0.5

    def check(self, model: AbstractModel) -> None:
        pass  # any shape can be made up

    def load(self, split: str, model: AbstractModel, *, seed: int, dtype: str) -> Samples:
        from gpp.data.samples import ColumnSamples

        check_split(split)
        return ColumnSamples(self.count(split), self.columns(split, model, seed), dtype)

    def count(self, split: str) -> int:
        """Samples of a split."""
        return self.num_samples if split == "train" else self.num_test_samples

    def columns(self, split: str, model: AbstractModel, seed: int) -> dict[str, Callable[[], np.ndarray]]:
        """By name, what makes the column of an input or a target."""
        draw = _Draw(seed=seed, split=split, num_samples=self.count(split), noise=self.noise)
        columns: dict[str, Callable[[], np.ndarray]] = {}
        for name, spec in model.inputs().items():
            columns[name] = partial(draw.input, name, spec)
        for name, spec in model.targets().items():
            columns[TARGET + name] = partial(draw.target, TARGET + name, spec)
        return columns


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Draw:
    seed: int
    split: str
    num_samples: int
    noise: float

    def input(self, name: str, spec: TensorSpec) -> np.ndarray:
        """[num_samples, *spec.shape]. A bool input is True throughout: a mask that hides nothing."""
        shape = (self.num_samples, *spec.shape)
        if spec.dtype == "bool":
            return np.ones(shape, dtype=bool)
        if spec.dtype == "int":
            assert spec.high is not None  # every int has one
            # The sign of a projection of z chooses the lower or the upper half of the values.
            upper = self._signal(name, spec.num_elements).reshape(shape) > 0
            uniform = self._rng(name, self.split).random(shape)
            return np.minimum((uniform + upper) * spec.high / 2, spec.high - 1).astype(np.int64)
        width = spec.shape[-1] if spec.shape else 1
        signal = self._signal(name, width).reshape(self.num_samples, *[1] * (len(spec.shape) - 1), width)
        noise = self._rng(name, self.split).standard_normal((self.num_samples, *(spec.shape or (1,))), dtype=np.float32)
        return (signal + np.float32(self.noise) * noise).reshape(shape)

    def target(self, name: str, spec: TensorSpec) -> np.ndarray:
        """[num_samples, *spec.shape]: a number linear in z, its sign for truths, the largest of several for classes."""
        shape = (self.num_samples, *spec.shape)
        if spec.dtype == "float":
            return self._signal(name, spec.num_elements).reshape(shape)
        if spec.dtype == "bool":
            return self._signal(name, spec.num_elements).reshape(shape) > 0
        assert spec.high is not None  # every int has one
        num_classes = min(spec.high, MAX_CLASSES)
        return self._signal(name, spec.num_elements * num_classes).reshape(*shape, num_classes).argmax(-1).astype(np.int64)

    def _signal(self, name: str, width: int) -> np.ndarray:
        """z through a projection that both splits share: [num_samples, width], variance about 1."""
        z = self._rng("z", self.split).standard_normal((self.num_samples, NUM_HIDDEN), dtype=np.float32)
        projection = self._rng(name, "projection").standard_normal((NUM_HIDDEN, width), dtype=np.float32)
        return _product(z, projection) / np.float32(NUM_HIDDEN**0.5)

    def _rng(self, *words: str) -> np.random.Generator:
        return np.random.default_rng([self.seed, *(crc32(word.encode()) for word in words)])


def _product(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """The matrix product [n, k] x [k, m] -> [n, m], each element summed term by term in ascending order of k.

    The rounding of a library's matrix product depends on its kernels and threads, so two processes could train on
    different data.
    """
    out = np.empty((len(left), right.shape[1]), dtype=left.dtype)
    rows = max(1, BLOCK // right.shape[1])
    for lo in range(0, len(left), rows):
        block, factors = out[lo : lo + rows], left[lo : lo + rows, :, None]
        np.multiply(factors[:, 0], right[0], out=block)
        for k in range(1, len(right)):
            block += factors[:, k] * right[k]
    return out
