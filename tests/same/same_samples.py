"""Samples of given shapes, drawn by Python's own generator: the same with every version of the project and of torch."""

from __future__ import annotations

import math
import random

import torch
from torch.utils.data import Dataset


class Samples(Dataset):
    """Items `(inputs, targets)`; each value is drawn from its name and number alone.

    Args:
        inputs, targets: shapes by name.
    """

    def __init__(self, inputs: dict[str, list[int]], targets: dict[str, list[int]], num_samples: int = 320) -> None:
        self.inputs, self.targets, self.num_samples = inputs, targets, num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        if not 0 <= index < self.num_samples:
            raise IndexError(index)

        def drawn(shapes: dict[str, list[int]]) -> dict[str, torch.Tensor]:
            return {name: _drawn(f"{name} {index}", shape) for name, shape in shapes.items()}

        return drawn(self.inputs), drawn(self.targets)


def _drawn(name: str, shape: list[int]) -> torch.Tensor:
    """Numbers from -1 to 1."""
    rng = random.Random(name)
    values = [2.0 * rng.random() - 1.0 for _ in range(math.prod(shape))]
    return torch.tensor(values, dtype=torch.float64).reshape(shape)
