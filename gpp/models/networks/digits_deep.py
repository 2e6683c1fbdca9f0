"""The network of DigitsDeep. Shapes: B micro-batch."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from gpp.models.digits_deep import DigitsDeep


class DigitsDeepNetwork(nn.Module):
    """Pixels [B, 64] -> logits [B, 10]."""

    def __init__(self, settings: DigitsDeep) -> None:
        super().__init__()
        widths = [64, *[settings.width] * (settings.num_layers - 1), 10]
        layers = [nn.Linear(narrow, wide) for narrow, wide in pairwise(widths)]
        for layer in layers:
            # Keeps the deviation of what passes a tanh through many layers, for inputs of deviation 1 (LeCun et al. 1998).
            nn.init.normal_(layer.weight, std=layer.in_features**-0.5)
            nn.init.zeros_(layer.bias)
        self.layers = nn.ModuleList(layers)

    def forward(self, image: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            image = torch.tanh(layer(image))
        return self.layers[-1](image)
