"""Attention residuals (Kimi Team, arXiv 2603.15031): a layer's input is a weighted mean of what earlier blocks of layers made.

Shapes: B micro-batch, L sequence, D hidden width, N blocks so far, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gpp.models.networks.layers import GatedMlp, Rotary, RotaryAttention, divides
from gpp.settings import Count, arguments


class DepthAttention(nn.Module):
    """Attention over blocks with one learned query, at each position by itself: N tensors [B, L, D] -> [B, L, D]."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(hidden, eps=1e-5)
        self.query = nn.Linear(hidden, 1, bias=False)

    def forward(self, blocks: list[Tensor]) -> Tensor:
        made_NBLD = torch.stack(blocks)
        return (self.query(self.norm(made_NBLD)).softmax(dim=0) * made_NBLD).sum(dim=0)


class BlockReader(nn.Module):
    """A norm and a function, whose input is a mean over the blocks: N tensors [B, L, D] -> [B, L, D]."""

    def __init__(self, hidden: int, function: nn.Module) -> None:
        super().__init__()
        self.mix, self.norm, self.function = DepthAttention(hidden), nn.RMSNorm(hidden, eps=1e-5), function

    def forward(self, blocks: list[Tensor], *rotary: Rotary) -> Tensor:
        return self.function(self.norm(self.mix(blocks)), *rotary)


class BlockResiduals(nn.Module):
    """A decoder of causal attentions and gated MLPs: token ids [B, L] -> logits [B, L, V] of the next tokens.

    Within a block the layers' outputs are added up. Each layer reads the embedding, all blocks before its own and the sum
    so far, so every stage reads something of every stage before it.

    Args:
        num_layers: pairs of an attention and an MLP, in `num_blocks` equal blocks.
        hidden, num_heads, ffn: their width, attention heads and inner width of the MLPs.
        vocabulary, sequence: token ids and their number.
    """

    @arguments("model")
    def __init__(
        self,
        *,
        num_layers: Count,
        num_blocks: Count,
        hidden: Count,
        num_heads: Count,
        ffn: Count,
        vocabulary: Count,
        sequence: Count,
    ) -> None:
        super().__init__()
        divides(num_heads=num_heads, hidden=hidden)
        divides(num_blocks=num_blocks, num_layers=num_layers)
        self.size = num_layers // num_blocks
        self.tokens = nn.Embedding(vocabulary, hidden)
        self.rotary = Rotary(sequence, hidden // num_heads)
        self.attentions = nn.ModuleList(BlockReader(hidden, RotaryAttention(hidden, num_heads)) for _ in range(num_layers))
        self.mlps = nn.ModuleList(BlockReader(hidden, GatedMlp(hidden, ffn)) for _ in range(num_layers))
        self.mix, self.norm = DepthAttention(hidden), nn.RMSNorm(hidden, eps=1e-5)
        self.head = nn.Linear(hidden, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        blocks = [self.tokens(tokens)]
        for i, (attention, mlp) in enumerate(zip(self.attentions, self.mlps, strict=True)):
            made = attention(blocks, self.rotary)
            blocks = [*blocks, made] if i % self.size == 0 else [*blocks[:-1], blocks[-1] + made]
            blocks = [*blocks[:-1], blocks[-1] + mlp(blocks)]
        return self.head(self.norm(self.mix(blocks)))
