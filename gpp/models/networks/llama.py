"""Llama 3 (arXiv 2407.21783): the decoder that most engines of chains train; a chain, so nothing is gained by branches.

Shapes: B micro-batch, L sequence, D hidden width, V vocabulary.
"""

from __future__ import annotations

from torch import Tensor, nn

from gpp.models.networks.layers import LlamaLayer, Rotary, divides
from gpp.settings import Count, arguments


class Llama(nn.Module):
    """Decoder layers with RMS norms, rotary positions and gated MLPs: token ids [B, L] -> logits [B, L, V] of the next tokens.

    Args:
        num_layers, hidden, num_heads, ffn: layers, their width, heads of queries, and inner width of the MLP.
        num_kv_heads: heads of keys and values, each of which several heads of queries read.
        vocabulary, sequence: token ids and their number.
    """

    @arguments("model")
    def __init__(
        self,
        *,
        num_layers: Count,
        hidden: Count,
        num_heads: Count,
        num_kv_heads: Count,
        ffn: Count,
        vocabulary: Count,
        sequence: Count,
    ) -> None:
        super().__init__()
        divides(num_heads=num_heads, hidden=hidden)
        divides(num_kv_heads=num_kv_heads, num_heads=num_heads)
        self.tok_embeddings = nn.Embedding(vocabulary, hidden)
        self.rotary = Rotary(sequence, hidden // num_heads)
        self.layers = nn.ModuleList(LlamaLayer(hidden, num_heads, ffn, num_kv_heads) for _ in range(num_layers))
        self.norm = nn.RMSNorm(hidden, eps=1e-5)
        self.lm_head = nn.Linear(hidden, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x_BLD = self.tok_embeddings(tokens)
        for layer in self.layers:
            x_BLD = layer(x_BLD, self.rotary)
        return self.lm_head(self.norm(x_BLD))
