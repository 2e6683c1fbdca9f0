"""The network of DLRM.

Shapes: B micro-batch, E embedding width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from gpp.models.networks.layers import FeedForward

if TYPE_CHECKING:
    from gpp.models.dlrm import DLRM


class ConcatenatedBag(nn.Module):
    """An embedding bag whose rows are laid side by side: row numbers [B, bag] -> [B, bag * E]."""

    def __init__(self, num_rows: int, embedding: int) -> None:
        super().__init__()
        self.table = nn.Embedding(num_rows, embedding)

    def forward(self, rows: Tensor) -> Tensor:
        return self.table(rows).flatten(1)


class DLRMNetwork(nn.Module):
    """Dense features [B, num_dense_features] and row numbers [B, bag] -> logits [B]."""

    def __init__(self, settings: DLRM) -> None:
        super().__init__()
        hidden, rows, embedding = settings.hidden, settings.num_rows, settings.embedding
        tower = [settings.num_dense_features] + [hidden] * settings.num_layers
        joined = settings.num_dense * hidden + settings.num_sparse * settings.bag * embedding
        self.dense_towers = nn.ModuleList(FeedForward(tower) for _ in range(settings.num_dense))
        self.sparse_towers = nn.ModuleList(ConcatenatedBag(rows, embedding) for _ in range(settings.num_sparse))
        self.top = FeedForward([joined] + [hidden] * settings.num_top_layers)
        self.click = nn.Linear(hidden, 1)

    def forward(self, **inputs: Tensor) -> Tensor:
        dense = [tower(inputs[f"dense_{i}"]) for i, tower in enumerate(self.dense_towers)]
        sparse = [tower(inputs[f"sparse_{i}"]) for i, tower in enumerate(self.sparse_towers)]
        return self.click(self.top(torch.cat([*dense, *sparse], dim=-1))).squeeze(-1)
