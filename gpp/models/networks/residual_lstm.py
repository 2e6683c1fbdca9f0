"""The network of ResidualLSTM. Shapes: B micro-batch, L target and M source sequence, D hidden width, V vocabulary."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from gpp.models.networks.layers import drop

if TYPE_CHECKING:
    from gpp.models.residual_lstm import ResidualLSTM


class Recurrent(nn.Module):
    """One LSTM layer, from zero states: [B, L, before] -> [B, L, D], or 2 D both ways; a shortcut adds the first D of its input."""

    def __init__(self, before: int, hidden: int, dropout: float, *, both_ways: bool = False, shortcut: bool = False) -> None:
        super().__init__()
        self.dropout, self.shortcut = dropout, shortcut
        self.lstm = nn.LSTM(before, hidden, batch_first=True, bidirectional=both_ways)

    def forward(self, x_BLD: Tensor, context_BLD: Tensor | None = None) -> Tensor:
        both = x_BLD if context_BLD is None else torch.cat([x_BLD, context_BLD], dim=-1)
        y_BLD = self.lstm(drop(both, self))[0]
        return x_BLD + y_BLD if self.shortcut else y_BLD


class AdditiveAttention(nn.Module):
    """Bahdanau's: queries [B, L, D], memory [B, M, D] -> [B, L, D]."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(hidden, hidden, bias=False), nn.Linear(hidden, hidden)
        self.score = nn.Linear(hidden, 1, bias=False)

    def forward(self, x_BLD: Tensor, memory_BMD: Tensor) -> Tensor:
        summed_BLMD = self.query(x_BLD).unsqueeze(2) + self.key(memory_BMD).unsqueeze(1)
        weights_BLM = self.score(torch.tanh(summed_BLMD)).squeeze(-1).softmax(dim=-1)
        return weights_BLM @ memory_BMD


class ResidualLSTMNetwork(nn.Module):
    """Source token ids [B, M] and the target's, one late, [B, L] -> logits [B, L, V]."""

    def __init__(self, settings: ResidualLSTM) -> None:
        super().__init__()
        hidden, both_ways = settings.hidden, settings.bidirectional
        layer, first_shortcut = (hidden, settings.dropout), 2 if both_ways else 1
        self.embed_source, self.embed_target = (nn.Embedding(settings.vocabulary, hidden) for _ in range(2))
        if settings.tied:
            self.embed_target.weight = self.embed_source.weight
        self.encoder, self.decoder = nn.ModuleList(), nn.ModuleList()
        for i in range(settings.num_layers):
            shortcut = i >= first_shortcut
            before = 2 * hidden if i == 1 and both_ways else hidden
            self.encoder.append(Recurrent(before, *layer, both_ways=both_ways and i == 0, shortcut=shortcut))
            self.decoder.append(Recurrent(2 * hidden if i else hidden, *layer, shortcut=shortcut))
        self.attention = AdditiveAttention(hidden)
        self.classify = nn.Linear(hidden, settings.vocabulary)

    def forward(self, source: Tensor, previous: Tensor) -> Tensor:
        memory_BMD = self.embed_source(source)
        for layer in self.encoder:
            memory_BMD = layer(memory_BMD)
        x_BLD = self.decoder[0](self.embed_target(previous))
        context_BLD = self.attention(x_BLD, memory_BMD)
        for layer in self.decoder[1:]:
            x_BLD = layer(x_BLD, context_BLD)
        return self.classify(x_BLD)
