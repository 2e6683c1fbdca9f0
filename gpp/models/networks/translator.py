"""The network of Translator. Shapes: B micro-batch, L target and M source sequence, D hidden width, V vocabulary."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from gpp.models.networks.layers import CrossLayer, TokenEmbedding, TransformerLayer

if TYPE_CHECKING:
    from gpp.models.translator import Translator


class TranslatorNetwork(nn.Module):
    """Source token ids [B, M] and the target's, one late, [B, L] -> logits [B, L, V]."""

    def __init__(self, settings: Translator) -> None:
        super().__init__()
        hidden, tokens = settings.hidden, (settings.vocabulary, settings.sequence, settings.hidden)
        layer, each = (hidden, settings.num_heads, settings.ffn, settings.dropout), range(settings.num_layers)
        self.embed_source, self.embed_target = TokenEmbedding(*tokens), TokenEmbedding(*tokens)
        self.encoder = nn.ModuleList(TransformerLayer(*layer) for _ in each)
        self.encoder_norm = nn.LayerNorm(hidden)
        self.decoder = nn.ModuleList(CrossLayer(*layer, causal=True) for _ in each)
        self.norm = nn.LayerNorm(hidden)
        self.classify = nn.Linear(hidden, settings.vocabulary)

    def forward(self, source: Tensor, previous: Tensor) -> Tensor:
        memory_BMD = self.embed_source(source)
        for layer in self.encoder:
            memory_BMD = layer(memory_BMD)
        memory_BMD, x_BLD = self.encoder_norm(memory_BMD), self.embed_target(previous)
        for layer in self.decoder:
            x_BLD = layer(x_BLD, memory_BMD)
        return self.classify(self.norm(x_BLD))
