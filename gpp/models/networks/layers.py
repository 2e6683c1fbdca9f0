"""Layers that several networks share.

Shapes: B micro-batch, L sequence, D hidden width, H heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from gpp.errors import InvalidConfig

Rate = Annotated[float, Field(ge=0, lt=1)]
"""The share of values that dropout sets to zero."""


def divides(**sizes: int) -> None:
    """Refuse a first argument that does not divide the second one, as in `divides(num_heads=num_heads, hidden=hidden)`.

    Raises:
        InvalidConfig: names both.
    """
    (part, divisor), (whole, size) = sizes.items()
    if size % divisor:
        largest = next(d for d in range(min(divisor, size), 0, -1) if size % d == 0)
        raise InvalidConfig(f"model.{part}", divisor, f"must divide model.{whole}={size}", f"set model.{part}={largest}")


class FeedForward(nn.Module):
    """Linear layers with a ReLU after each, as in towers of DLRM and CANDLE-Uno: [B, widths[0]] -> [B, widths[-1]]."""

    def __init__(self, widths: Sequence[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(narrow, wide) for narrow, wide in pairwise(widths))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.relu(layer(x))
        return x


class SelfAttention(nn.Module):
    """Multi-head self-attention with one fused projection for queries, keys and values: [B, L, D] -> [B, L, D].

    In causal attention a position sees itself and the positions before it.
    """

    def __init__(self, hidden: int, num_heads: int, dropout: float = 0.0, *, causal: bool = False) -> None:
        super().__init__()
        self.num_heads, self.dropout, self.causal = num_heads, dropout, causal
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.out = nn.Linear(hidden, hidden)

    def forward(self, x_BLD: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in self.qkv(x_BLD).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout if self.training else 0.0, is_causal=self.causal)
        return self.out(y.transpose(1, 2).flatten(2))


class CrossAttention(nn.Module):
    """Multi-head attention of one sequence to another: [B, L, D], [B, M, context (default D)] -> [B, L, D]."""

    def __init__(self, hidden: int, num_heads: int, dropout: float = 0.0, *, context: int | None = None) -> None:
        super().__init__()
        self.num_heads, self.dropout = num_heads, dropout
        self.query = nn.Linear(hidden, hidden)
        self.key_value = nn.Linear(context or hidden, 2 * hidden)
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
    """A pre-norm Transformer layer, an encoder's or (causal) a decoder's: [B, L, D] -> [B, L, D]."""

    def __init__(self, hidden: int, num_heads: int, ffn: int, dropout: float = 0.0, *, causal: bool = False) -> None:
        super().__init__()
        self.dropout = dropout
        self.attention_norm = nn.LayerNorm(hidden)
        self.attention = SelfAttention(hidden, num_heads, dropout, causal=causal)
        self.mlp_norm = nn.LayerNorm(hidden)
        self.mlp = Mlp(hidden, ffn)

    def forward(self, x_BLD: Tensor) -> Tensor:
        x_BLD = x_BLD + drop(self.attention(self.attention_norm(x_BLD)), self)
        return x_BLD + drop(self.mlp(self.mlp_norm(x_BLD)), self)


class CrossLayer(nn.Module):
    """Attention to itself (causal: a decoder's layer), then to another sequence: [B, L, D], [B, M, D] -> [B, L, D]."""

    def __init__(self, hidden: int, num_heads: int, ffn: int, dropout: float = 0.0, *, causal: bool = False) -> None:
        super().__init__()
        self.dropout = dropout
        self.self_norm = nn.LayerNorm(hidden)
        self.self_attention = SelfAttention(hidden, num_heads, dropout, causal=causal)
        self.cross_norm = nn.LayerNorm(hidden)
        self.cross_attention = CrossAttention(hidden, num_heads, dropout)
        self.mlp_norm = nn.LayerNorm(hidden)
        self.mlp = Mlp(hidden, ffn)

    def forward(self, x_BLD: Tensor, other_BMD: Tensor) -> Tensor:
        x_BLD = x_BLD + drop(self.self_attention(self.self_norm(x_BLD)), self)
        x_BLD = x_BLD + drop(self.cross_attention(self.cross_norm(x_BLD), other_BMD), self)
        return x_BLD + drop(self.mlp(self.mlp_norm(x_BLD)), self)


class Rotary(nn.Module):
    """Rotates queries and keys by their position: [B, L, 2, H, C] -> the same; one table for all layers."""

    cos: Tensor
    sin: Tensor

    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        frequencies = 10000.0 ** (-torch.arange(0, width, 2) / width)
        angles = torch.outer(torch.arange(length).to(frequencies.dtype), frequencies)[:, None, None]
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * self.cos - b * self.sin, b * self.cos + a * self.sin], dim=-1)


class RotaryAttention(nn.Module):
    """Causal attention with rotated queries and keys, without biases: [B, L, source (default D)] -> [B, L, D]."""

    def __init__(self, hidden: int, num_heads: int, *, source: int | None = None) -> None:
        super().__init__()
        source = source or hidden
        self.num_heads = num_heads
        self.qkv = nn.Linear(source, 3 * source, bias=False)
        self.out = nn.Linear(source, hidden, bias=False)

    def forward(self, x_BLD: Tensor, rotary: Rotary) -> Tensor:
        qkv = self.qkv(x_BLD).unflatten(-1, (3, self.num_heads, -1))
        q, k = rotary(qkv[:, :, :2]).transpose(1, 3).unbind(2)
        y = F.scaled_dot_product_attention(q, k, qkv[:, :, 2].transpose(1, 2), is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class GroupedAttention(nn.Module):
    """As `RotaryAttention`, and several heads of queries read one head of keys and values: [B, L, D] -> [B, L, D]."""

    def __init__(self, hidden: int, num_heads: int, num_kv_heads: int) -> None:
        super().__init__()
        width, self.num_heads, self.num_kv_heads = hidden // num_heads, num_heads, num_kv_heads
        self.query = nn.Linear(hidden, hidden, bias=False)
        self.key, self.value = (nn.Linear(hidden, num_kv_heads * width, bias=False) for _ in range(2))
        self.out = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x_BLD: Tensor, rotary: Rotary) -> Tensor:
        q, k = (
            rotary(of(x_BLD).unflatten(-1, (1, heads, -1))).squeeze(2)
            for of, heads in ((self.query, self.num_heads), (self.key, self.num_kv_heads))
        )
        v = self.value(x_BLD).unflatten(-1, (self.num_kv_heads, -1))
        k, v = (x.unsqueeze(3).expand(-1, -1, -1, self.num_heads // self.num_kv_heads, -1).flatten(2, 3) for x in (k, v))
        y = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class GatedMlp(nn.Module):
    """An MLP whose inner values are gated by SiLU: [B, L, D] -> [B, L, D]."""

    def __init__(self, hidden: int, ffn: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(hidden, ffn, bias=False), nn.Linear(hidden, ffn, bias=False)
        self.down = nn.Linear(ffn, hidden, bias=False)

    def forward(self, x_BLD: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x_BLD)) * self.up(x_BLD))


class LlamaLayer(nn.Module):
    """A decoder layer with RMS norms, rotated queries and keys, and a gated MLP: [B, L, D] -> [B, L, D]."""

    def __init__(self, hidden: int, num_heads: int, ffn: int, num_kv_heads: int | None = None) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(hidden, eps=1e-5)
        pairs = num_kv_heads or num_heads
        self.attention = GroupedAttention(hidden, num_heads, pairs) if pairs < num_heads else RotaryAttention(hidden, num_heads)
        self.mlp_norm = nn.RMSNorm(hidden, eps=1e-5)
        self.mlp = GatedMlp(hidden, ffn)

    def forward(self, x_BLD: Tensor, rotary: Rotary) -> Tensor:
        x_BLD = x_BLD + self.attention(self.attention_norm(x_BLD), rotary)
        return x_BLD + self.mlp(self.mlp_norm(x_BLD))


class Encoder(nn.Module):
    """A stack of Transformer layers and a norm, the MLP four times as wide: [B, L, D] -> [B, L, D]."""

    def __init__(self, num_layers: int, hidden: int, num_heads: int, *, causal: bool = False) -> None:
        super().__init__()
        layers = (TransformerLayer(hidden, num_heads, 4 * hidden, causal=causal) for _ in range(num_layers))
        self.layers = nn.Sequential(*layers)
        self.norm = nn.LayerNorm(hidden)

    def forward(self, x_BLD: Tensor) -> Tensor:
        return self.norm(self.layers(x_BLD))


class TokenEmbedding(nn.Module):
    """Token ids [B, L] -> [B, L, D], with learned positions."""

    def __init__(self, vocabulary: int, sequence: int, hidden: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, hidden)
        self.positions = nn.Parameter(torch.randn(sequence, hidden) * 0.02)

    def forward(self, ids: Tensor) -> Tensor:
        return self.tokens(ids) + self.positions


class PatchEmbedding(nn.Module):
    """Patches of an image or spectrogram behind a class token, with positions: [B, C, S, S'] -> [B, 1 + M, D]."""

    def __init__(self, channels: int, size: tuple[int, int], patch: int, hidden: int, *, stride: int | None = None) -> None:
        super().__init__()
        stride = stride or patch
        num_patches = ((size[0] - patch) // stride + 1) * ((size[1] - patch) // stride + 1)
        self.patches = nn.Conv2d(channels, hidden, patch, stride, bias=False)
        self.class_token = nn.Parameter(torch.randn(hidden) * 0.02)
        self.positions = nn.Parameter(torch.randn(1 + num_patches, hidden) * 0.02)

    def forward(self, image: Tensor) -> Tensor:
        patches = self.patches(image).flatten(2).transpose(1, 2)
        token = self.class_token.expand(image.shape[0], 1, -1)
        return torch.cat([token, patches], dim=1) + self.positions


def drop(x: Tensor, layer: Any) -> Tensor:
    """Dropout at the rate `layer.dropout` of a module; leaves no operator in the graph when the rate is 0."""
    return F.dropout(x, layer.dropout, layer.training) if layer.dropout else x
