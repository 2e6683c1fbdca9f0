"""The network of MLP. Shapes: B micro-batch, D width."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor, nn

if TYPE_CHECKING:
    from gpp.models.mlp import MLP


class Block(nn.Module):
    """[B, D] -> [B, D]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width)

    def forward(self, x_BD: Tensor) -> Tensor:
        return F.relu(self.second(F.relu(self.first(x_BD))))


class MLPNetwork(nn.Module):
    """x [B, D] -> [B, D]."""

    def __init__(self, settings: MLP) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block(settings.width) for _ in range(settings.num_blocks)))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x)
