"""The network of BridgeTower.

Shapes: B micro-batch, L tokens, M patches, D hidden width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from gpp.models.networks.layers import CrossLayer, TransformerLayer

if TYPE_CHECKING:
    from gpp.models.bridge_tower import BridgeTower


class Text(nn.Module):
    """Token ids [B, L] -> [B, L, D]."""

    def __init__(self, settings: BridgeTower) -> None:
        super().__init__()
        self.tokens = nn.Embedding(settings.vocabulary, settings.hidden)
        self.positions = nn.Parameter(torch.randn(settings.text_sequence, settings.hidden) * 0.02)

    def forward(self, text: Tensor) -> Tensor:
        return self.tokens(text) + self.positions


class Image(nn.Module):
    """Pixels [B, 3, S, S] -> patches [B, M, D]."""

    def __init__(self, settings: BridgeTower) -> None:
        super().__init__()
        num_patches = (settings.image_size // settings.patch_size) ** 2
        self.patches = nn.Conv2d(3, settings.hidden, settings.patch_size, settings.patch_size)
        self.positions = nn.Parameter(torch.randn(num_patches, settings.hidden) * 0.02)

    def forward(self, image: Tensor) -> Tensor:
        return self.patches(image).flatten(2).transpose(1, 2) + self.positions


class Bridge(nn.Module):
    """Adds what a tower says at this height to what the cross layers below have: [B, L, D], [B, L, D] -> [B, L, D]."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)

    def forward(self, tower_BLD: Tensor, cross_BLD: Tensor | None) -> Tensor:
        return self.norm(tower_BLD if cross_BLD is None else tower_BLD + cross_BLD)


class BridgeTowerNetwork(nn.Module):
    """Token ids [B, L] and pixels [B, 3, S, S] -> logits [B, num_classes]."""

    def __init__(self, settings: BridgeTower) -> None:
        super().__init__()
        hidden, crosses = settings.hidden, settings.num_cross_layers

        layer = (hidden, settings.num_heads, settings.ffn, settings.dropout)

        def tower() -> nn.ModuleList:
            return nn.ModuleList(TransformerLayer(*layer) for _ in range(settings.num_layers))

        self.num_plain = settings.num_layers - crosses
        self.text, self.image = Text(settings), Image(settings)
        self.text_layers, self.image_layers = tower(), tower()
        self.text_bridges = nn.ModuleList(Bridge(hidden) for _ in range(crosses))
        self.image_bridges = nn.ModuleList(Bridge(hidden) for _ in range(crosses))
        self.text_cross = nn.ModuleList(CrossLayer(*layer) for _ in range(crosses))
        self.image_cross = nn.ModuleList(CrossLayer(*layer) for _ in range(crosses))
        self.classify = nn.Linear(2 * hidden, settings.num_classes)

    def forward(self, text: Tensor, image: Tensor) -> Tensor:
        text, image = self.text(text), self.image(image)
        for i in range(self.num_plain):
            text, image = self.text_layers[i](text), self.image_layers[i](image)
        cross_text: Tensor | None = None
        cross_image: Tensor | None = None
        for i in range(len(self.text_cross)):
            text, image = self.text_layers[self.num_plain + i](text), self.image_layers[self.num_plain + i](image)
            into_text, into_image = self.text_bridges[i](text, cross_text), self.image_bridges[i](image, cross_image)
            cross_text, cross_image = self.text_cross[i](into_text, into_image), self.image_cross[i](into_image, into_text)
        assert cross_text is not None and cross_image is not None  # there is at least one cross layer
        return self.classify(torch.cat([cross_text.mean(dim=1), cross_image.mean(dim=1)], dim=-1))
