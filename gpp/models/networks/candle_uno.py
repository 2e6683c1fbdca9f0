"""The network of CANDLE-Uno. Shapes: B micro-batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from gpp.models.networks.layers import FeedForward

if TYPE_CHECKING:
    from gpp.models.candle_uno import CandleUno


class CandleUnoNetwork(nn.Module):
    """Inputs [B, width] by name -> predicted growth [B, 1]."""

    def __init__(self, settings: CandleUno) -> None:
        super().__init__()
        hidden, features = settings.hidden, settings.features
        tower = [hidden] * settings.num_layers
        self.towers = nn.ModuleDict({name: FeedForward([width, *tower]) for name, width in features.items()})
        self.head = FeedForward([len(features) * hidden] + [settings.head_hidden] * settings.num_head_layers)
        self.growth = nn.Linear(settings.head_hidden, 1)

    def forward(self, **inputs: Tensor) -> Tensor:
        encoded = [tower(inputs[name]) for name, tower in self.towers.items()]
        return self.growth(self.head(torch.cat(encoded, dim=-1)))
