"""Handwritten digits: 1797 images of 8 x 8 pixels, in digits.csv.bz2 beside this file (digits.md has their source)."""

from __future__ import annotations

from pathlib import Path
from typing import final

import numpy as np

from gpp.data.base import TARGET, AbstractData, HeldOut, Samples, check_split
from gpp.errors import InvalidConfig
from gpp.models.base import AbstractModel
from gpp.settings import settings

NUM_PIXELS, NUM_CLASSES = 64, 10
MAX_INTENSITY = 16


@final
@settings("data")
class DigitsData(AbstractData):
    """Images scaled to 0..1. The split is stratified by class and the same for every seed.

    Args:
        test_fraction: share of each class held out; 0.2 gives 1437 and 360 images.
        standardize: scale every pixel to mean 0 and deviation 1 over the training images instead (LeCun et al.,
            "Efficient BackProp", 1998); a pixel that is the same in all images becomes 0.
    """

    test_fraction: HeldOut = 0.2
    standardize: bool = False

    def check(self, model: AbstractModel) -> None:
        _names(model)

    def load(self, split: str, model: AbstractModel, *, seed: int, dtype: str) -> Samples:
        from gpp.data.samples import ColumnSamples

        check_split(split)
        image, digit = _names(model)
        table = _read()
        labels = table[:, NUM_PIXELS].astype(np.int64)
        held_out = _held_out(labels, self.test_fraction)
        rows, pixels = np.flatnonzero(held_out == (split == "test")), table[:, :NUM_PIXELS] / MAX_INTENSITY
        if self.standardize:
            mean, deviation = pixels[~held_out].mean(axis=0), pixels[~held_out].std(axis=0)
            pixels = np.where(deviation > 0, (pixels - mean) / np.where(deviation > 0, deviation, 1.0), 0.0)
        images = pixels[rows].reshape(len(rows), *model.inputs()[image].shape)
        return ColumnSamples(len(rows), {image: lambda: images, TARGET + digit: lambda: labels[rows]}, dtype)


def _names(model: AbstractModel) -> tuple[str, str]:
    """The model's names for the image and its class."""
    inputs, targets = model.inputs(), model.targets()
    fits = len(inputs) == 1 and all(spec.dtype == "float" and spec.num_elements == NUM_PIXELS for spec in inputs.values())
    if not fits or len(targets) != 1 or any(spec.dtype != "int" or (spec.high or 0) < NUM_CLASSES for spec in targets.values()):
        rule = f"takes {', '.join(inputs)} and {', '.join(targets)}, but data=digits has 64 pixels and one of 10 classes"
        raise InvalidConfig("model", model.name, rule, "data=synthetic, which fits every model")
    return next(iter(inputs)), next(iter(targets))


def _read() -> np.ndarray:
    """[1797, 65]: 64 intensities in 0..16, then the class."""
    return np.loadtxt(Path(__file__).with_name("digits.csv.bz2"), delimiter=",", dtype=np.float32)


def _held_out(labels: np.ndarray, fraction: float) -> np.ndarray:
    """The rows for testing: [num_rows], bool. Largest remainders bring the total to ceil(fraction * num_rows)."""
    counts = np.bincount(labels, minlength=NUM_CLASSES)
    quota = counts * fraction
    held = np.floor(quota).astype(int)
    missing = int(np.ceil(quota.sum())) - held.sum()
    held[np.argsort(held - quota, kind="stable")[:missing]] += 1
    rng = np.random.default_rng(0)
    mask = np.zeros(len(labels), dtype=bool)
    for digit, num_held in enumerate(held):
        mask[rng.permutation(np.flatnonzero(labels == digit))[:num_held]] = True
    return mask


Digits = DigitsData  # the name in files of earlier versions
