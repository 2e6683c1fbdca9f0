"""Layers that several networks share.

Shapes: B micro-batch, L sequence, D hidden width, H heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol

import torch.nn.functional as F
from torch import Tensor, nn


class FeedForward(nn.Module):
    """Linear layers with a ReLU after each, as in the towers of DLRM and CANDLE-Uno: [B, widths[0]] -> [B, widths[-1]]."""

    def __init__(self, widths: Sequence[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(narrow, wide) for narrow, wide in pairwise(widths))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.relu(layer(x))
        return x


class SelfAttention(nn.Module):
    """Multi-head self-attention with one fused projection for queries, keys and values: [B, L, D] -> [B, L, D]."""

    def __init__(self, hidden: int, num_heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.num_heads, self.dropout = num_heads, dropout
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.out = nn.Linear(hidden, hidden)

    def forward(self, x_BLD: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in self.qkv(x_BLD).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout if self.training else 0.0)
        return self.out(y.transpose(1, 2).flatten(2))


class CrossAttention(nn.Module):
    """Multi-head attention of one sequence to another: [B, L, D], [B, M, D] -> [B, L, D]."""

    def __init__(self, hidden: int, num_heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.num_heads, self.dropout = num_heads, dropout
        self.query = nn.Linear(hidden, hidden)
        self.key_value = nn.Linear(hidden, 2 * hidden)
        self.out = nn.Linear(hidden, hidden)

    def forward(self, x_BLD: Tensor, context_BMD: Tensor) -> Tensor:
        parts = (self.query(x_BLD), *self.key_value(context_BMD).chunk(2, dim=-1))
        q, k, v = (part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout if self.training else 0.0)
        return self.out(y.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """The position-wise half of a Transformer layer: [B, L, D] -> [B, L, D]."""

    def __init__(self, hidden: int, ffn: int) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, ffn)
        self.down = nn.Linear(ffn, hidden)

    def forward(self, x_BLD: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x_BLD)))


class TransformerLayer(nn.Module):
    """A pre-norm Transformer encoder layer: [B, L, D] -> [B, L, D]."""

    def __init__(self, hidden: int, num_heads: int, ffn: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = dropout
        self.attention_norm = nn.LayerNorm(hidden)
        self.attention = SelfAttention(hidden, num_heads, dropout)
        self.mlp_norm = nn.LayerNorm(hidden)
        self.mlp = Mlp(hidden, ffn)

    def forward(self, x_BLD: Tensor) -> Tensor:
        x_BLD = x_BLD + drop(self.attention(self.attention_norm(x_BLD)), self)
        return x_BLD + drop(self.mlp(self.mlp_norm(x_BLD)), self)


class _HasDropout(Protocol):
    dropout: float
    training: bool


def drop(x: Tensor, layer: _HasDropout) -> Tensor:
    """Dropout at the layer's rate; leaves no operator in the graph when the rate is 0."""
    return F.dropout(x, layer.dropout, layer.training) if layer.dropout else x
