"""The network of FLAVA.

Shapes: B micro-batch, L tokens, M patches, D hidden width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from gpp.models.networks.layers import Encoder, PatchEmbedding, TokenEmbedding

if TYPE_CHECKING:
    from gpp.models.flava import FLAVA


class Modality(nn.Module):
    """One modality as its embedding makes tokens of it -> [B, L, D], ready for the multimodal encoder."""

    def __init__(self, embed: nn.Module, num_layers: int, settings: FLAVA) -> None:
        super().__init__()
        self.embed = embed
        self.encoder = Encoder(num_layers, settings.hidden, settings.num_heads)
        self.project = nn.Linear(settings.hidden, settings.hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.project(self.encoder(self.embed(x)))


class FLAVANetwork(nn.Module):
    """Token ids [B, L] and pixels [B, 3, S, S] -> logits [B] of `they belong together`."""

    def __init__(self, settings: FLAVA) -> None:
        super().__init__()
        hidden, size = settings.hidden, (settings.image_size, settings.image_size)
        text = TokenEmbedding(settings.vocabulary, settings.text_sequence, hidden)
        self.text = Modality(text, settings.text_layers, settings)
        self.image = Modality(PatchEmbedding(3, size, settings.patch_size, hidden), settings.image_layers, settings)
        self.class_token = nn.Parameter(torch.randn(hidden) * 0.02)
        self.multimodal = Encoder(settings.multimodal_layers, hidden, settings.num_heads)
        self.match = nn.Linear(hidden, 1)

    def forward(self, text: Tensor, image: Tensor) -> Tensor:
        token = self.class_token.expand(text.shape[0], 1, -1)
        both = torch.cat([token, self.image(image), self.text(text)], dim=1)
        return self.match(self.multimodal(both)[:, 0]).squeeze(-1)
