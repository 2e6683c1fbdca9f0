"""Multi-token prediction (DeepSeek-V3, arXiv 2412.19437): modules behind the trunk predict tokens farther ahead.

Shapes: B micro-batch, L sequence, D hidden width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpp.models.networks.layers import LlamaLayer, Rotary, divides
from gpp.settings import Count, arguments

WEIGHT = 0.3  # of the mean loss of all modules beside the trunk's; the paper's, for the first 10T tokens


class Ahead(nn.Module):
    """One module: the position's state and the embedding of a token ahead -> a state: twice [B, L, D] -> [B, L, D]."""

    def __init__(self, hidden: int, num_heads: int, ffn: int) -> None:
        super().__init__()
        self.state_norm, self.token_norm = nn.RMSNorm(hidden, eps=1e-5), nn.RMSNorm(hidden, eps=1e-5)
        self.join = nn.Linear(2 * hidden, hidden, bias=False)
        self.layer = LlamaLayer(hidden, num_heads, ffn)

    def forward(self, state_BLD: Tensor, token_BLD: Tensor, rotary: Rotary) -> Tensor:
        return self.layer(self.join(torch.cat([self.state_norm(state_BLD), self.token_norm(token_BLD)], dim=-1)), rotary)


class MultiToken(nn.Module):
    """A decoder with modules that predict ahead: token ids [B, L + ahead] -> 1 + ahead logits [B, L, V] of tokens one farther each.

    All modules read the embedding and the head of the trunk, so that both are on several stages; the losses are made on
    several stages, too.

    Args:
        ahead: modules behind the trunk.
        num_layers, hidden, num_heads, ffn: layers of the trunk, their width, heads and inner width.
        vocabulary, sequence: token ids, and L.
    """

    @arguments("model")
    def __init__(
        self,
        *,
        ahead: Count,
        num_layers: Count,
        hidden: Count,
        num_heads: Count,
        ffn: Count,
        vocabulary: Count,
        sequence: Count,
    ) -> None:
        super().__init__()
        divides(num_heads=num_heads, hidden=hidden)
        self.sequence, layer = sequence, (hidden, num_heads, ffn)
        self.tokens = nn.Embedding(vocabulary, hidden)
        self.rotary = Rotary(sequence, hidden // num_heads)
        self.layers = nn.ModuleList(LlamaLayer(*layer) for _ in range(num_layers))
        self.ahead = nn.ModuleList(Ahead(*layer) for _ in range(ahead))
        self.norm = nn.RMSNorm(hidden, eps=1e-5)
        self.head = nn.Linear(hidden, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> tuple[Tensor, ...]:
        embedded = self.tokens(tokens)
        x_BLD = embedded[:, : self.sequence]
        for layer in self.layers:
            x_BLD = layer(x_BLD, self.rotary)
        logits = [self.head(self.norm(x_BLD))]
        for i, ahead in enumerate(self.ahead, start=1):
            x_BLD = ahead(x_BLD, embedded[:, i : i + self.sequence], self.rotary)
            logits.append(self.head(self.norm(x_BLD)))
        return tuple(logits)


def all_tokens_loss(outputs: Sequence[Tensor], next_tokens: Tensor) -> dict[str, Tensor]:
    """Cross entropy of the trunk, and of each module with its share of `WEIGHT`, as terms.

    Args:
        outputs: as the network returns them.
        next_tokens: [B, L + ahead].
    """
    length, modules = outputs[0].shape[1], len(outputs) - 1
    return {
        f"ahead_{i}" if i else "next": F.cross_entropy(logits.flatten(0, 1), next_tokens[:, i : i + length].flatten())
        * (WEIGHT / modules if i else 1.0)
        for i, logits in enumerate(outputs)
    }
