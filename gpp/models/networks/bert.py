"""BERT as it is pre-trained (Devlin et al., NAACL '19): a post-norm encoder whose masked tokens are told from their context.

Shapes: B micro-batch, L sequence, D hidden width, V vocabulary.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from gpp.models.networks.layers import Mlp, Rate, SelfAttention, TokenEmbedding, divides, drop
from gpp.settings import Count, arguments


class PostNormLayer(nn.Module):
    """A Transformer layer whose norms stand behind its sums: [B, L, D] -> [B, L, D]."""

    def __init__(self, hidden: int, num_heads: int, ffn: int, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.attention = SelfAttention(hidden, num_heads, dropout)
        self.attention_norm = nn.LayerNorm(hidden)
        self.mlp = Mlp(hidden, ffn)
        self.mlp_norm = nn.LayerNorm(hidden)

    def forward(self, x_BLD: Tensor) -> Tensor:
        x_BLD = self.attention_norm(x_BLD + drop(self.attention(x_BLD), self))
        return self.mlp_norm(x_BLD + drop(self.mlp(x_BLD), self))


class MaskedLanguageModel(nn.Module):
    """Token ids [B, L] -> logits [B, L, V] of the true tokens.

    BERT ties the head to the token embedding, and embeds segments, of which there is one here. The head is its own matrix, for
    the reason that `gpp.models.networks.gpt.GPT` gives.

    Args:
        num_layers, hidden, num_heads: layers, their width and attention heads; the MLP is four times as wide.
        vocabulary, sequence: token ids and their number.
        dropout: rate after attention and MLP, and inside attention.
    """

    @arguments("model")
    def __init__(
        self, *, num_layers: Count, hidden: Count, num_heads: Count, vocabulary: Count, sequence: Count, dropout: Rate
    ) -> None:
        super().__init__()
        divides(num_heads=num_heads, hidden=hidden)
        self.embed = TokenEmbedding(vocabulary, sequence, hidden)
        self.embed_norm = nn.LayerNorm(hidden)
        self.layers = nn.Sequential(*(PostNormLayer(hidden, num_heads, 4 * hidden, dropout) for _ in range(num_layers)))
        self.transform = nn.Linear(hidden, hidden)
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        x_BLD = self.layers(self.embed_norm(self.embed(tokens)))
        return self.head(self.norm(F.gelu(self.transform(x_BLD))))
