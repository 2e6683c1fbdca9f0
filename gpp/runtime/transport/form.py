"""The form of a message: what its receiver must know before it comes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import final

import torch

MAIN_MEMORY = torch.device("cpu")


@final
@dataclass(frozen=True)
class Form:
    """Shape, type and place of one contiguous tensor.

    Args:
        device: where buffers of this form are made.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device = MAIN_MEMORY

    @cached_property
    def num_bytes(self) -> int:
        """Bytes of a message."""
        return math.prod(self.shape) * self.dtype.itemsize

    def empty(self) -> torch.Tensor:
        """A buffer for a message."""
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)
