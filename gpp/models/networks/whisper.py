"""Whisper (arXiv 2212.04356): an encoder of sound, whose output every layer of a decoder of text reads.

Shapes: B micro-batch, F bands, M frames behind the convolutions, L tokens, D hidden width, V vocabulary.
"""

from __future__ import annotations

from math import log

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpp.models.networks.layers import CrossLayer, Encoder, TokenEmbedding, divides
from gpp.settings import Count, arguments


class SoundEncoder(nn.Module):
    """A spectrogram [B, F, 2 M] -> [B, M, D]: two convolutions, fixed positions, Transformer layers."""

    positions: Tensor

    def __init__(self, bands: int, frames: int, num_layers: int, hidden: int, num_heads: int) -> None:
        super().__init__()
        self.enter, self.halve = nn.Conv1d(bands, hidden, 3, padding=1), nn.Conv1d(hidden, hidden, 3, stride=2, padding=1)
        frequencies = torch.exp(-log(10000.0) * torch.arange(hidden // 2) / (hidden // 2 - 1))
        angles = torch.outer(torch.arange(frames).to(frequencies.dtype), frequencies)
        self.register_buffer("positions", torch.cat([angles.sin(), angles.cos()], dim=1), persistent=False)
        self.encoder = Encoder(num_layers, hidden, num_heads)

    def forward(self, sound: Tensor) -> Tensor:
        x = F.gelu(self.halve(F.gelu(self.enter(sound))))
        return self.encoder(x.transpose(1, 2) + self.positions)


class Whisper(nn.Module):
    """A spectrogram [B, F, 2 M] and token ids [B, L] -> logits [B, L, V] of the next tokens; the head is the embedding's matrix.

    Args:
        num_layers: layers of the encoder, and as many of the decoder.
        hidden, num_heads: their width and attention heads; the MLPs are four times as wide.
        bands, frames: of the spectrogram, of which the encoder makes M = frames / 2 vectors.
        vocabulary, sequence: token ids and their number.
    """

    @arguments("model")
    def __init__(
        self, *, num_layers: Count, hidden: Count, num_heads: Count, bands: Count, frames: Count, vocabulary: Count, sequence: Count
    ) -> None:
        super().__init__()
        divides(num_heads=num_heads, hidden=hidden)
        self.encoder = SoundEncoder(bands, frames // 2, num_layers, hidden, num_heads)
        self.embed = TokenEmbedding(vocabulary, sequence, hidden)
        nn.init.normal_(self.embed.tokens.weight, std=0.02)
        self.decoder = nn.ModuleList(CrossLayer(hidden, num_heads, 4 * hidden, causal=True) for _ in range(num_layers))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, vocabulary, bias=False)
        self.head.weight = self.embed.tokens.weight

    def forward(self, sound: Tensor, previous: Tensor) -> Tensor:
        heard, x_BLD = self.encoder(sound), self.embed(previous)
        for layer in self.decoder:
            x_BLD = layer(x_BLD, heard)
        return self.head(self.norm(x_BLD))
