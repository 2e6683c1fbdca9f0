"""The network of GPT. Shapes: B micro-batch, L sequence, D hidden width, V vocabulary."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from gpp.models.networks.layers import TokenEmbedding, TransformerLayer

if TYPE_CHECKING:
    from gpp.models.gpt import GPT


class GPTNetwork(nn.Module):
    """Token ids [B, L] -> logits [B, L, V] of the tokens that follow."""

    def __init__(self, settings: GPT) -> None:
        super().__init__()
        hidden = settings.hidden
        layer = (hidden, settings.num_heads, 4 * hidden, settings.dropout)
        self.embed = TokenEmbedding(settings.vocabulary, settings.sequence, hidden)
        self.layers = nn.ModuleList(TransformerLayer(*layer, causal=True) for _ in range(settings.num_layers))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, settings.vocabulary, bias=False)
        if settings.tied:
            nn.init.normal_(self.embed.tokens.weight, std=0.02)  # as a head, rows of length 40 would give logits of hundreds
            self.head.weight = self.embed.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x_BLD = self.embed(tokens)
        for layer in self.layers:
            x_BLD = layer(x_BLD)
        return self.head(self.norm(x_BLD))
