"""A translator of residual LSTM layers with attention, as GNMT (Wu et al., 2016, arXiv 1609.08144).

Shapes: B micro-batch, L target and M source sequence, D hidden width, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gpp.models.networks.layers import Rate, drop
from gpp.settings import Count, arguments


class Recurrent(nn.Module):
    """One LSTM layer, from zero states: [B, L, before] -> [B, L, D], or 2 D both ways.

    A shortcut adds the first D of its input.
    """

    def __init__(self, before: int, hidden: int, dropout: float, *, both_ways: bool = False, shortcut: bool = False) -> None:
        super().__init__()
        self.dropout, self.shortcut = dropout, shortcut
        self.lstm = nn.LSTM(before, hidden, batch_first=True, bidirectional=both_ways)

    def forward(self, x_BLD: Tensor, context_BLD: Tensor | None = None) -> Tensor:
        both = x_BLD if context_BLD is None else torch.cat([x_BLD, context_BLD], dim=-1)
        y_BLD = self.lstm(drop(both, self))[0]
        return x_BLD + y_BLD if self.shortcut else y_BLD


class AdditiveAttention(nn.Module):
    """Bahdanau's attention: queries [B, L, D], memory [B, M, D] -> [B, L, D]."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(hidden, hidden, bias=False), nn.Linear(hidden, hidden)
        self.score = nn.Linear(hidden, 1, bias=False)

    def forward(self, x_BLD: Tensor, memory_BMD: Tensor) -> Tensor:
        summed_BLMD = self.query(x_BLD).unsqueeze(2) + self.key(memory_BMD).unsqueeze(1)
        weights_BLM = self.score(torch.tanh(summed_BLMD)).squeeze(-1).softmax(dim=-1)
        return weights_BLM @ memory_BMD


class ResidualLSTM(nn.Module):
    """An encoder and a decoder of LSTM layers with shortcuts; every decoder layer reads the first one's attention.

    Source token ids [B, M] and the target's, one late, [B, L] -> logits [B, L, V]. The decoder is taught with the true
    tokens before each one, so a layer is one operator over the whole sequence. As in the reference implementation of
    MLPerf, the attention's queries are the first decoder layer's outputs, not those of the step before.

    Args:
        num_layers: layers of the encoder, and as many of the decoder.
        hidden: width of all of them.
        vocabulary: token ids of both languages.
        bidirectional: whether the encoder's first layer reads both ways; shortcuts then begin at the third layers, else
            at the second.
        tied: whether both languages have one embedding; it joins two stages by an all-reduce.
        dropout: rate before each layer.
    """

    @arguments("model")
    def __init__(
        self, *, num_layers: Count, hidden: Count, vocabulary: Count, bidirectional: bool, tied: bool, dropout: Rate
    ) -> None:
        super().__init__()
        layer, first_shortcut = (hidden, dropout), 2 if bidirectional else 1
        self.embed_source, self.embed_target = (nn.Embedding(vocabulary, hidden) for _ in range(2))
        if tied:
            self.embed_target.weight = self.embed_source.weight
        self.encoder, self.decoder = nn.ModuleList(), nn.ModuleList()
        for i in range(num_layers):
            shortcut = i >= first_shortcut
            before = 2 * hidden if i == 1 and bidirectional else hidden
            self.encoder.append(Recurrent(before, *layer, both_ways=bidirectional and i == 0, shortcut=shortcut))
            self.decoder.append(Recurrent(2 * hidden if i else hidden, *layer, shortcut=shortcut))
        self.attention = AdditiveAttention(hidden)
        self.classify = nn.Linear(hidden, vocabulary)

    def forward(self, source: Tensor, previous: Tensor) -> Tensor:
        memory_BMD = self.embed_source(source)
        for layer in self.encoder:
            memory_BMD = layer(memory_BMD)
        x_BLD = self.decoder[0](self.embed_target(previous))
        context_BLD = self.attention(x_BLD, memory_BMD)
        for layer in self.decoder[1:]:
            x_BLD = layer(x_BLD, context_BLD)
        return self.classify(x_BLD)
