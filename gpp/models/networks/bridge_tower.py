"""BridgeTower (AAAI '23, arXiv 2206.08657): text and image towers with bridges from upper layers to cross layers.

Its operator graph is not series-parallel: each cross layer reads both towers in the middle, and the towers go on.

Shapes: B micro-batch, L tokens, M patches, D hidden width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gpp.errors import InvalidConfig
from gpp.models.networks.layers import CrossLayer, Rate, TokenEmbedding, TransformerLayer, divides
from gpp.settings import Count, arguments


class ImagePatches(nn.Module):
    """Pixels [B, 3, S, S] -> patches [B, M, D]."""

    def __init__(self, size: int, patch: int, hidden: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, hidden, patch, patch)
        self.positions = nn.Parameter(torch.randn((size // patch) ** 2, hidden) * 0.02)

    def forward(self, image: Tensor) -> Tensor:
        return self.patches(image).flatten(2).transpose(1, 2) + self.positions


class Bridge(nn.Module):
    """Adds a tower's output at this height to the cross layers' below: [B, L, D], [B, L, D] -> [B, L, D]."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)

    def forward(self, tower_BLD: Tensor, cross_BLD: Tensor | None) -> Tensor:
        return self.norm(tower_BLD if cross_BLD is None else tower_BLD + cross_BLD)


class BridgeTower(nn.Module):
    """The wiring of BridgeTower with layers of our own: pre-norm towers and cross layers, additive bridges.

    Token ids [B, L] and pixels [B, 3, S, S] -> logits [B, num_classes].

    Args:
        num_layers: layers of each tower.
        num_cross_layers: cross layers, each fed by one of the last layers of the towers.
        hidden, num_heads, ffn: width, attention heads and inner width of a layer.
        vocabulary, text_sequence: token ids and their number.
        image_size, patch_size: pixels per side.
        num_classes: width of the output.
        dropout: rate after attention and MLP, and inside attention.
    """

    @arguments("model")
    def __init__(
        self,
        *,
        num_layers: Count,
        num_cross_layers: Count,
        hidden: Count,
        num_heads: Count,
        ffn: Count,
        vocabulary: Count,
        text_sequence: Count,
        image_size: Count,
        patch_size: Count,
        num_classes: Count,
        dropout: Rate,
    ) -> None:
        super().__init__()
        divides(num_heads=num_heads, hidden=hidden)
        divides(patch_size=patch_size, image_size=image_size)
        if num_cross_layers > num_layers:
            rule = f"must not exceed model.num_layers={num_layers}"
            raise InvalidConfig("model.num_cross_layers", num_cross_layers, rule, f"set model.num_cross_layers={num_layers}")
        layer, crosses = (hidden, num_heads, ffn, dropout), num_cross_layers

        def tower() -> nn.ModuleList:
            return nn.ModuleList(TransformerLayer(*layer) for _ in range(num_layers))

        self.num_plain = num_layers - crosses
        self.text, self.image = TokenEmbedding(vocabulary, text_sequence, hidden), ImagePatches(image_size, patch_size, hidden)
        self.text_layers, self.image_layers = tower(), tower()
        self.text_bridges = nn.ModuleList(Bridge(hidden) for _ in range(crosses))
        self.image_bridges = nn.ModuleList(Bridge(hidden) for _ in range(crosses))
        self.text_cross = nn.ModuleList(CrossLayer(*layer) for _ in range(crosses))
        self.image_cross = nn.ModuleList(CrossLayer(*layer) for _ in range(crosses))
        self.classify = nn.Linear(2 * hidden, num_classes)

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
