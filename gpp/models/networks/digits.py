"""Digits: four towers, one per quadrant of an 8 x 8 image of a handwritten digit; the default model.

Shapes: B micro-batch, D hidden width.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpp.settings import Count, arguments

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


class QuadrantTower(nn.Module):
    """The 4 x 4 pixels from (row, column) on: image [B, 8, 8] -> [B, D]."""

    def __init__(self, row: int, column: int, num_layers: int, hidden: int) -> None:
        super().__init__()
        self.row, self.column = row, column
        self.embed = nn.Linear(16, hidden)
        self.layers = nn.Sequential(*(ResidualLayer(hidden) for _ in range(num_layers)))
        self.norm = nn.LayerNorm(hidden)

    def forward(self, image: Tensor) -> Tensor:
        pixels = image[:, self.row : self.row + 4, self.column : self.column + 4]
        return self.norm(self.layers(self.embed(pixels.flatten(1))))


class Digits(nn.Module):
    """Each tower sees one quadrant (4 x 4 pixels) through residual layers; a head joins them.

    Image [B, 8, 8] in 0..1 -> logits [B, 10]; with the second task {"logits": [B, 10], "even": [B]}. The model is small
    enough to learn in seconds on one core, and wide enough to give a stage something to compute.

    Args:
        num_layers: residual layers of a tower.
        hidden: width of the towers and of the head.
        parity: whether a second head tells even digits from odd ones; its loss is `digit_and_parity`.
    """

    @arguments("model")
    def __init__(self, *, num_layers: Count, hidden: Count, parity: bool) -> None:
        super().__init__()
        self.towers = nn.ModuleList(QuadrantTower(row, column, num_layers, hidden) for row, column in QUADRANTS)
        self.join = nn.Linear(len(QUADRANTS) * hidden, hidden)
        self.classify = nn.Linear(hidden, 10)
        self.parity = nn.Sequential(ResidualLayer(hidden), nn.Linear(hidden, 1)) if parity else None

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
