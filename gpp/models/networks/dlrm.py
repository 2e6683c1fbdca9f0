"""DLRM, the recommender of GraphPipe (ASPLOS '25, appendix A.2): dense towers and embedding tables, concatenated.

Shapes: B micro-batch, E embedding width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gpp.models.networks.layers import FeedForward
from gpp.settings import Count, arguments


class ConcatenatedBag(nn.Module):
    """An embedding bag whose rows are laid side by side: row numbers [B, bag] -> [B, bag * E]."""

    def __init__(self, num_rows: int, embedding: int) -> None:
        super().__init__()
        self.table = nn.Embedding(num_rows, embedding)

    def forward(self, rows: Tensor) -> Tensor:
        return self.table(rows).flatten(1)


class DLRM(nn.Module):
    """Feed-forward towers beside embedding bags whose rows are concatenated, not summed; then a top MLP.

    Dense features [B, num_dense_features] and row numbers [B, bag] -> logits [B]. The width of the dense features (that
    of the towers) and the depth of the top MLP (that of the towers) are our choice: the paper does not give them.

    Args:
        num_dense: dense features, inputs `dense_I` of shape [num_dense_features].
        num_sparse: sparse features, inputs `sparse_I` of shape [bag] with row numbers.
        num_layers: feed-forward layers of a dense tower, each `hidden` wide.
        num_rows, embedding: size of a table.
        bag: rows looked up per sample and table.
        num_top_layers: layers of the top MLP, each `hidden` wide, before the output.
    """

    @arguments("model")
    def __init__(
        self,
        *,
        num_dense: Count,
        num_sparse: Count,
        num_dense_features: Count,
        num_layers: Count,
        hidden: Count,
        num_rows: Count,
        embedding: Count,
        bag: Count,
        num_top_layers: Count,
    ) -> None:
        super().__init__()
        tower = [num_dense_features] + [hidden] * num_layers
        joined = num_dense * hidden + num_sparse * bag * embedding
        self.dense_towers = nn.ModuleList(FeedForward(tower) for _ in range(num_dense))
        self.sparse_towers = nn.ModuleList(ConcatenatedBag(num_rows, embedding) for _ in range(num_sparse))
        self.top = FeedForward([joined] + [hidden] * num_top_layers)
        self.click = nn.Linear(hidden, 1)

    def forward(self, **inputs: Tensor) -> Tensor:
        dense = [tower(inputs[f"dense_{i}"]) for i, tower in enumerate(self.dense_towers)]
        sparse = [tower(inputs[f"sparse_{i}"]) for i, tower in enumerate(self.sparse_towers)]
        return self.click(self.top(torch.cat([*dense, *sparse], dim=-1))).squeeze(-1)
