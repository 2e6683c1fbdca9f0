"""Manifold-constrained hyper-connections (DeepSeek, arXiv 2512.24880): several residual streams, which every layer mixes anew.

Shapes: B micro-batch, L sequence, N streams, D hidden width, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gpp.models.networks.layers import GatedMlp, Rotary, RotaryAttention, divides
from gpp.settings import Count, arguments


class HyperConnection(nn.Module):
    """A norm and a function between streams: [B, L, N, D] -> the same.

    The weights of reading, writing and mixing follow from the streams. The mixing matrix is doubly stochastic: its rows and
    columns are divided by their sums in turn (Sinkhorn and Knopp).
    """

    def __init__(self, hidden: int, streams: int, rounds: int, function: nn.Module) -> None:
        super().__init__()
        self.streams, self.rounds = streams, rounds
        self.stream_norm = nn.RMSNorm(streams * hidden, eps=1e-5)
        self.weights = nn.Linear(streams * hidden, streams * (streams + 2))
        self.norm, self.function = nn.RMSNorm(hidden, eps=1e-5), function

    def forward(self, x_BLND: Tensor, *rotary: Rotary) -> Tensor:
        n = self.streams
        reading, writing, mixing = self.weights(self.stream_norm(x_BLND.flatten(2))).split([n, n, n * n], dim=-1)
        mixing = mixing.unflatten(-1, (n, n)).exp()
        for _ in range(self.rounds):
            mixing = mixing / mixing.sum(-1, keepdim=True)
            mixing = mixing / mixing.sum(-2, keepdim=True)
        read_BLD = (reading.sigmoid()[..., None] * x_BLND).sum(2)
        made_BLD = self.function(self.norm(read_BLD), *rotary)
        return mixing @ x_BLND + 2 * writing.sigmoid()[..., None] * made_BLD[:, :, None]


class HyperConnections(nn.Module):
    """A decoder of causal attentions and gated MLPs: token ids [B, L] -> logits [B, L, V] of the next tokens.

    It is a chain, but one whose cuts are N times as wide. The streams begin as copies of the embedding, and the head reads
    their sum.

    Args:
        streams: residual streams.
        rounds: divisions of rows and columns that make a mixing matrix doubly stochastic.
        num_layers: pairs of an attention and an MLP.
        hidden, num_heads, ffn: their width, attention heads and inner width of the MLPs.
        vocabulary, sequence: token ids and their number.
    """

    @arguments("model")
    def __init__(
        self,
        *,
        streams: Count,
        rounds: Count,
        num_layers: Count,
        hidden: Count,
        num_heads: Count,
        ffn: Count,
        vocabulary: Count,
        sequence: Count,
    ) -> None:
        super().__init__()
        divides(num_heads=num_heads, hidden=hidden)
        self.streams, own = streams, (hidden, streams, rounds)
        self.tokens = nn.Embedding(vocabulary, hidden)
        self.rotary = Rotary(sequence, hidden // num_heads)
        each = range(num_layers)
        self.attentions = nn.ModuleList(HyperConnection(*own, RotaryAttention(hidden, num_heads)) for _ in each)
        self.mlps = nn.ModuleList(HyperConnection(*own, GatedMlp(hidden, ffn)) for _ in each)
        self.norm = nn.RMSNorm(hidden, eps=1e-5)
        self.head = nn.Linear(hidden, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x_BLND = torch.stack([self.tokens(tokens)] * self.streams, dim=2)
        for attention, mlp in zip(self.attentions, self.mlps, strict=True):
            x_BLND = mlp(attention(x_BLND, self.rotary))
        return self.head(self.norm(x_BLND.sum(2)))
