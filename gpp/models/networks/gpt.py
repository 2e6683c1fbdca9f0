"""GPT-2 (Radford et al., 2019): a deep decoder without branches, where graph pipelining has nothing to gain.

Shapes: B micro-batch, L sequence, D hidden width, V vocabulary.
"""

from __future__ import annotations

from torch import Tensor, nn

from gpp.models.networks.layers import Rate, TokenEmbedding, TransformerLayer, divides
from gpp.settings import Count, arguments


class GPT(nn.Module):
    """A plain chain of causal pre-norm Transformer layers: token ids [B, L] -> logits [B, L, V] of the next tokens.

    GPT-2 ties the head to the token embedding. Here the head is its own matrix unless `tied`: the tie joins the first
    and the last stage by an all-reduce of 322 MB each step, which has nothing to do with the shape of the graph.

    Args:
        num_layers, hidden, num_heads: layers, their width and attention heads; the MLP is four times as wide.
        vocabulary, sequence: token ids and their number.
        tied: whether the head's matrix is the token embedding.
        dropout: rate after attention and MLP, and inside attention.
    """

    @arguments("model")
    def __init__(
        self,
        *,
        num_layers: Count,
        hidden: Count,
        num_heads: Count,
        vocabulary: Count,
        sequence: Count,
        tied: bool,
        dropout: Rate,
    ) -> None:
        super().__init__()
        divides(num_heads=num_heads, hidden=hidden)
        layer = (hidden, num_heads, 4 * hidden, dropout)
        self.embed = TokenEmbedding(vocabulary, sequence, hidden)
        self.layers = nn.Sequential(*(TransformerLayer(*layer, causal=True) for _ in range(num_layers)))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, vocabulary, bias=False)
        if tied:
            # In the head, rows of length 40 would give logits of hundreds.
            nn.init.normal_(self.embed.tokens.weight, std=0.02)
            self.head.weight = self.embed.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.layers(self.embed(tokens))))
