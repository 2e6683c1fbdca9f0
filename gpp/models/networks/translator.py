"""The first Transformer (Vaswani et al., 2017, arXiv 1706.03762): every decoder layer sees the end of the encoder.

Shapes: B micro-batch, L target and M source sequence, D hidden width, V vocabulary.
"""

from __future__ import annotations

from torch import Tensor, nn

from gpp.models.networks.layers import CrossLayer, Rate, TokenEmbedding, TransformerLayer, divides
from gpp.settings import Count, arguments


class Translator(nn.Module):
    """Pre-norm encoder and decoder layers, taught with the true tokens before each one.

    Source token ids [B, M] and the target's, one late, [B, L] -> logits [B, L, V]. The paper has one matrix for both
    embeddings and the head; here there are three, since one would join three stages by an all-reduce. Positions are
    learned.

    Args:
        num_layers: layers of the encoder, and as many of the decoder.
        hidden, num_heads, ffn: width, attention heads, width of the MLPs.
        vocabulary, sequence: token ids and their number, of both languages.
        dropout: rate after attention and MLP, and inside attention.
    """

    @arguments("model")
    def __init__(
        self,
        *,
        num_layers: Count,
        hidden: Count,
        num_heads: Count,
        ffn: Count,
        vocabulary: Count,
        sequence: Count,
        dropout: Rate,
    ) -> None:
        super().__init__()
        divides(num_heads=num_heads, hidden=hidden)
        tokens, layer, each = (vocabulary, sequence, hidden), (hidden, num_heads, ffn, dropout), range(num_layers)
        self.embed_source, self.embed_target = TokenEmbedding(*tokens), TokenEmbedding(*tokens)
        self.encoder = nn.Sequential(*(TransformerLayer(*layer) for _ in each))
        self.encoder_norm = nn.LayerNorm(hidden)
        self.decoder = nn.ModuleList(CrossLayer(*layer, causal=True) for _ in each)
        self.norm = nn.LayerNorm(hidden)
        self.classify = nn.Linear(hidden, vocabulary)

    def forward(self, source: Tensor, previous: Tensor) -> Tensor:
        memory_BMD = self.encoder_norm(self.encoder(self.embed_source(source)))
        x_BLD = self.embed_target(previous)
        for layer in self.decoder:
            x_BLD = layer(x_BLD, memory_BMD)
        return self.classify(self.norm(x_BLD))
