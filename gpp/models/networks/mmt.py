"""The network of MMT.

Shapes: B micro-batch, L sequence, D hidden width, P branches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from gpp.models.networks.layers import TransformerLayer

if TYPE_CHECKING:
    from gpp.models.mmt import MMT


class Branch(nn.Module):
    """One modality: [B, L, D] -> [B, D]."""

    def __init__(self, settings: MMT) -> None:
        super().__init__()
        layer = (settings.hidden, settings.num_heads, settings.ffn, settings.dropout)
        self.layers = nn.ModuleList(TransformerLayer(*layer) for _ in range(settings.num_layers))
        self.norm = nn.LayerNorm(settings.hidden)

    def forward(self, x_BLD: Tensor) -> Tensor:
        for layer in self.layers:
            x_BLD = layer(x_BLD)
        return self.norm(x_BLD).mean(dim=1)


class MMTNetwork(nn.Module):
    """P sequences [B, L, D] -> [B, num_outputs]."""

    def __init__(self, settings: MMT) -> None:
        super().__init__()
        self.branches = nn.ModuleList(Branch(settings) for _ in range(settings.num_branches))
        self.head = nn.Linear(settings.num_branches * settings.hidden, settings.num_outputs)

    def forward(self, **inputs: Tensor) -> Tensor:
        pooled = [branch(inputs[f"branch_{i}"]) for i, branch in enumerate(self.branches)]
        return self.head(torch.cat(pooled, dim=-1))
