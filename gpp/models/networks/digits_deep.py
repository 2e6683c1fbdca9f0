"""The network of DigitsDeep. Shapes: B micro-batch."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from gpp.models.digits_deep import DigitsDeep

MEAN, DEVIATION = 0.305, 0.376  # of the pixels that data=digits trains on; without it eight layers end near 88 % instead of 96 %


class DigitsDeepNetwork(nn.Module):
    """Pixels [B, 64] -> logits [B, 10]."""

    def __init__(self, settings: DigitsDeep) -> None:
        super().__init__()
        widths = [64, *[settings.width] * (settings.num_layers - 1), 10]
        self.layers = nn.ModuleList(nn.Linear(narrow, wide) for narrow, wide in pairwise(widths))

    def forward(self, image: Tensor) -> Tensor:
        x = (image - MEAN) / DEVIATION
        for layer in self.layers[:-1]:
            x = torch.tanh(layer(x))
        return self.layers[-1](x)
