"""FLAVA (CVPR '22, arXiv 2112.04482): a text and an image encoder, then a shorter encoder over both.

Shapes: B micro-batch, L tokens, M patches, D hidden width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gpp.models.networks.layers import Encoder, PatchEmbedding, TokenEmbedding, divides
from gpp.settings import Count, arguments


class Modality(nn.Module):
    """One modality, whose embedding makes tokens of it -> [B, L, D], ready for the multimodal encoder."""

    def __init__(self, embed: nn.Module, num_layers: int, hidden: int, num_heads: int) -> None:
        super().__init__()
        self.embed = embed
        self.encoder = Encoder(num_layers, hidden, num_heads)
        self.project = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.project(self.encoder(self.embed(x)))


class FLAVA(nn.Module):
    """Two pre-norm Transformer encoders, projected and concatenated for a third.

    Token ids [B, L] and pixels [B, 3, S, S] -> logits [B] of `they belong together`. The loss is image-text matching,
    one of FLAVA's five: whether text and image belong together, told from the class token of the multimodal encoder.

    Args:
        text_layers, image_layers, multimodal_layers: layers of the three encoders.
        hidden, num_heads: their width and attention heads.
        vocabulary, text_sequence: token ids and their number.
        image_size, patch_size: pixels per side.
    """

    @arguments("model")
    def __init__(
        self,
        *,
        text_layers: Count,
        image_layers: Count,
        multimodal_layers: Count,
        hidden: Count,
        num_heads: Count,
        vocabulary: Count,
        text_sequence: Count,
        image_size: Count,
        patch_size: Count,
    ) -> None:
        super().__init__()
        divides(num_heads=num_heads, hidden=hidden)
        divides(patch_size=patch_size, image_size=image_size)
        text = TokenEmbedding(vocabulary, text_sequence, hidden)
        self.text = Modality(text, text_layers, hidden, num_heads)
        image = PatchEmbedding(3, (image_size, image_size), patch_size, hidden)
        self.image = Modality(image, image_layers, hidden, num_heads)
        self.class_token = nn.Parameter(torch.randn(hidden) * 0.02)
        self.multimodal = Encoder(multimodal_layers, hidden, num_heads)
        self.match = nn.Linear(hidden, 1)

    def forward(self, text: Tensor, image: Tensor) -> Tensor:
        token = self.class_token.expand(text.shape[0], 1, -1)
        both = torch.cat([token, self.image(image), self.text(text)], dim=1)
        return self.match(self.multimodal(both)[:, 0]).squeeze(-1)
