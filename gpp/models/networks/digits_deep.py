"""Digits by a deep, narrow chain: a linear layer for each stage, on which methods of pipelining are compared.

Shapes: B micro-batch.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn

from gpp.settings import Count, arguments


class DigitsDeep(nn.Module):
    """`num_layers` linear layers with tanh between them: pixels [B, 64] -> logits [B, 10].

    Without residual paths or norms the effect of stale gradients shows: the accuracy that an asynchronous method costs
    is seen within seconds. Inputs and weights are scaled for tanh as in LeCun et al., "Efficient BackProp" (1998).

    Args:
        num_layers: linear layers, including the last one, to the classes; on as many devices each has one.
        width: width of the layers between.
    """

    @arguments("model")
    def __init__(self, *, num_layers: Count, width: Count) -> None:
        super().__init__()
        widths = [64, *[width] * (num_layers - 1), 10]
        layers = [nn.Linear(narrow, wide) for narrow, wide in pairwise(widths)]
        for layer in layers:
            # This deviation carries through many layers of tanh, for inputs of deviation 1 (LeCun et al. 1998).
            nn.init.normal_(layer.weight, std=layer.in_features**-0.5)
            nn.init.zeros_(layer.bias)
        self.layers = nn.ModuleList(layers)

    def forward(self, image: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            image = torch.tanh(layer(image))
        return self.layers[-1](image)
