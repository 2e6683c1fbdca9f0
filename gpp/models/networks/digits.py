"""The network of Digits. Shapes: B micro-batch, D hidden width."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if TYPE_CHECKING:
    from gpp.models.digits import Digits


QUADRANTS = ((0, 0), (0, 4), (4, 0), (4, 4))


class ResidualLayer(nn.Module):
    """[B, D] -> [B, D]."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, hidden)
        self.down = nn.Linear(hidden, hidden)

    def forward(self, x_BD: Tensor) -> Tensor:
        return x_BD + self.down(F.relu(self.up(self.norm(x_BD))))


class Tower(nn.Module):
    """The 4 x 4 pixels from (row, column) on: image [B, 8, 8] -> [B, D]."""

    def __init__(self, row: int, column: int, settings: Digits) -> None:
        super().__init__()
        self.row, self.column = row, column
        self.embed = nn.Linear(16, settings.hidden)
        self.layers = nn.ModuleList(ResidualLayer(settings.hidden) for _ in range(settings.num_layers))
        self.norm = nn.LayerNorm(settings.hidden)

    def forward(self, image: Tensor) -> Tensor:
        pixels = image[:, self.row : self.row + 4, self.column : self.column + 4]
        x_BD = self.embed(pixels.flatten(1))
        for layer in self.layers:
            x_BD = layer(x_BD)
        return self.norm(x_BD)


class DigitsNetwork(nn.Module):
    """Image [B, 8, 8] in 0..1 -> logits [B, 10]; with the second task {"logits": [B, 10], "even": [B]}."""

    def __init__(self, settings: Digits) -> None:
        super().__init__()
        self.towers = nn.ModuleList(Tower(row, column, settings) for row, column in QUADRANTS)
        self.join = nn.Linear(len(QUADRANTS) * settings.hidden, settings.hidden)
        self.classify = nn.Linear(settings.hidden, 10)
        self.parity = None
        if settings.parity:
            self.parity = nn.Sequential(ResidualLayer(settings.hidden), nn.Linear(settings.hidden, 1))

    def forward(self, image: Tensor) -> Tensor | dict[str, Tensor]:
        joined = torch.cat([tower(image) for tower in self.towers], dim=-1)
        x_BD = F.relu(self.join(joined))
        if self.parity is None:
            return self.classify(x_BD)
        return {"logits": self.classify(x_BD), "even": self.parity(x_BD).squeeze(-1)}


def digit_and_parity(outputs: Mapping[str, Tensor], digit: Tensor) -> dict[str, Tensor]:
    """Two terms: cross entropy of the digit, and half the binary cross entropy of its being even.

    Args:
        outputs: `logits` [B, 10] and `even` [B].
        digit: [B], int64.
    """
    even = F.binary_cross_entropy_with_logits(outputs["even"], (digit % 2 == 0).to(outputs["even"].dtype))
    return {"digit": F.cross_entropy(outputs["logits"], digit), "parity": 0.5 * even}
