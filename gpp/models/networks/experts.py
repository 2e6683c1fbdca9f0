"""A mixture of experts with a loss that balances them and one for small logits, in every layer (OLMoE, arXiv 2409.02060).

Shapes: B micro-batch, L sequence, D hidden width, E experts, K experts of a token, C places of an expert, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from gpp.models.networks.layers import Rotary, RotaryAttention, divides
from gpp.settings import Count, arguments

BALANCE, SMALL = 0.01, 0.001  # weights of the two losses; OLMoE's


class Experts(nn.Module):
    """Gated MLPs, of which a router picks K for each token: [B, L, D] -> [B, L, D], balance loss [B], loss of the logits [B].

    An expert has C places for each sequence; tokens beyond them pass it by, as in GShard and Switch, so that all sizes are
    known. The balance loss is taken over each sequence by itself, as in DeepSeek-V3: over a batch it would depend on the cut.
    """

    def __init__(self, hidden: int, ffn: int, num_experts: int, num_active: int, capacity: float) -> None:
        super().__init__()
        self.num_active, self.capacity = num_active, capacity
        self.router = nn.Linear(hidden, num_experts, bias=False)
        self.gate, self.up = (nn.Parameter(torch.randn(num_experts, hidden, ffn) * hidden**-0.5) for _ in range(2))
        self.down = nn.Parameter(torch.randn(num_experts, ffn, hidden) * ffn**-0.5)

    def forward(self, x_BLD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        length, experts, active = x_BLD.shape[1], self.gate.shape[0], self.num_active
        places = ceil(self.capacity * length * active / experts)
        logits_BLE = self.router(x_BLD)
        shares_BLE = logits_BLE.softmax(-1)
        weight, chosen = shares_BLE.topk(active, dim=-1)
        taken_BSE = F.one_hot(chosen.flatten(1), experts)
        rank = (taken_BSE.cumsum(1) * taken_BSE).sum(-1) - 1
        # The place behind all others takes what has none.
        place = torch.where(rank < places, chosen.flatten(1) * places + rank, experts * places)[..., None].expand(
            -1, -1, x_BLD.shape[2]
        )
        given = x_BLD.repeat_interleave(active, dim=1)
        rows = given.new_zeros(given.shape[0], experts * places + 1, given.shape[2]).scatter(1, place, given)
        rows_BECD = rows[:, :-1].unflatten(1, (experts, places))
        made = (F.silu(rows_BECD @ self.gate) * (rows_BECD @ self.up)) @ self.down
        back = F.pad(made.flatten(1, 2), (0, 0, 0, 1)).gather(1, place).unflatten(1, (length, active))
        load_BE = taken_BSE.to(x_BLD.dtype).mean(1)
        balance = experts * (load_BE * shares_BLE.mean(1)).sum(-1)
        return (back * weight[..., None]).sum(2), balance, logits_BLE.logsumexp(-1).square().mean(-1)


class ExpertLayer(nn.Module):
    """A decoder layer with experts: [B, L, D] -> [B, L, D] and the losses of `Experts`."""

    def __init__(self, hidden: int, num_heads: int, experts: Experts) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(hidden, eps=1e-5)
        self.attention = RotaryAttention(hidden, num_heads)
        self.experts_norm = nn.RMSNorm(hidden, eps=1e-5)
        self.experts = experts

    def forward(self, x_BLD: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor, Tensor]:
        x_BLD = x_BLD + self.attention(self.attention_norm(x_BLD), rotary)
        made, balance, small = self.experts(self.experts_norm(x_BLD))
        return x_BLD + made, balance, small


class ExpertDecoder(nn.Module):
    """Token ids [B, L] -> `logits` [B, L, V] of the next tokens, and for each layer `balance.I` and `small.I` [B].

    Each layer's losses are made where the layer is.

    Args:
        num_layers, hidden, num_heads: layers, their width and attention heads.
        num_experts, num_active, ffn: experts of a layer, those of a token, and their inner width.
        capacity: places of an expert, as a multiple of the tokens that it gets when all get as many.
        vocabulary, sequence: token ids and their number.
    """

    @arguments("model")
    def __init__(
        self,
        *,
        num_layers: Count,
        hidden: Count,
        num_heads: Count,
        num_experts: Count,
        num_active: Count,
        ffn: Count,
        capacity: Annotated[float, Field(gt=0)],
        vocabulary: Count,
        sequence: Count,
    ) -> None:
        super().__init__()
        divides(num_heads=num_heads, hidden=hidden)
        self.tokens = nn.Embedding(vocabulary, hidden)
        self.rotary = Rotary(sequence, hidden // num_heads)
        sizes = (hidden, ffn, num_experts, num_active, capacity)
        self.layers = nn.ModuleList(ExpertLayer(hidden, num_heads, Experts(*sizes)) for _ in range(num_layers))
        self.norm = nn.RMSNorm(hidden, eps=1e-5)
        self.head = nn.Linear(hidden, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        x_BLD, losses = self.tokens(tokens), {}
        for i, layer in enumerate(self.layers):
            x_BLD, losses[f"balance.{i}"], losses[f"small.{i}"] = layer(x_BLD, self.rotary)
        return {"logits": self.head(self.norm(x_BLD))} | losses


def experts_loss(outputs: Mapping[str, Tensor], next_tokens: Tensor) -> dict[str, Tensor]:
    """Cross entropy of the next tokens, and the weighted losses of every layer, as terms."""
    weights = {"balance": BALANCE, "small": SMALL}
    own = {name: value.mean() * weights[name.partition(".")[0]] for name, value in outputs.items() if name != "logits"}
    return {"next": F.cross_entropy(outputs["logits"].flatten(0, 1), next_tokens.flatten())} | own
