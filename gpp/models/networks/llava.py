"""LLaVA-1.5 (arXiv 2310.03744): a vision branch beside the embedding of the text, then a long language trunk.

Shapes: B micro-batch, L positions (M of the image, then the text's), D hidden width, V vocabulary.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from gpp.models.networks.layers import Encoder, LlamaLayer, PatchEmbedding, Rotary, divides
from gpp.settings import Count, arguments


class ImageFeatures(nn.Module):
    """Pixels [B, 3, S, S] -> features of the patches [B, M, D of the tower]."""

    def __init__(self, size: int, patch: int, num_layers: int, hidden: int, num_heads: int) -> None:
        super().__init__()
        self.embed = PatchEmbedding(3, (size, size), patch, hidden)
        self.norm = nn.LayerNorm(hidden)
        self.encoder = Encoder(num_layers, hidden, num_heads)

    def forward(self, image: Tensor) -> Tensor:
        return self.encoder(self.norm(self.embed(image)))[:, 1:]


class LLaVA(nn.Module):
    """CLIP's image tower, a two-layer MLP, and Llama over image tokens followed by text tokens.

    Pixels [B, 3, S, S] and token ids [B, L - M] -> logits [B, L - M, V] of the tokens that follow. In this version the
    image comes first, the features are those of the tower's last layer (LLaVA reads the layer before and leaves the
    last idle), and only text positions are predicted.

    Args:
        image_layers, image_hidden, image_heads: layers of the image tower, their width and heads.
        image_size, patch_size: pixels per side.
        num_layers, hidden, num_heads, ffn: layers of the trunk, their width, heads and inner width.
        vocabulary, text_sequence: token ids and their number.
        frozen: the part that is not trained: `none`; `image`, the image tower, as in LLaVA's second stage; `towers`,
            the image tower and the trunk, all but the MLP, as in its first. A frozen image tower has no backward pass;
            a frozen trunk has one, for the MLP's sake, but no gradients of weights.
    """

    @arguments("model")
    def __init__(
        self,
        *,
        image_layers: Count,
        image_hidden: Count,
        image_heads: Count,
        image_size: Count,
        patch_size: Count,
        num_layers: Count,
        hidden: Count,
        num_heads: Count,
        ffn: Count,
        vocabulary: Count,
        text_sequence: Count,
        frozen: Literal["none", "image", "towers"],
    ) -> None:
        super().__init__()
        divides(image_heads=image_heads, image_hidden=image_hidden)
        divides(patch_size=patch_size, image_size=image_size)
        divides(num_heads=num_heads, hidden=hidden)
        self.num_patches = (image_size // patch_size) ** 2
        self.image = ImageFeatures(image_size, patch_size, image_layers, image_hidden, image_heads)
        self.project = nn.Sequential(nn.Linear(image_hidden, hidden), nn.GELU(), nn.Linear(hidden, hidden))
        self.tokens = nn.Embedding(vocabulary, hidden)
        self.rotary = Rotary(self.num_patches + text_sequence, hidden // num_heads)
        self.layers = nn.ModuleList(LlamaLayer(hidden, num_heads, ffn) for _ in range(num_layers))
        self.norm = nn.RMSNorm(hidden, eps=1e-5)
        self.head = nn.Linear(hidden, vocabulary, bias=False)
        parts = {"none": (), "image": (self.image,), "towers": (self.image, self.tokens, self.layers, self.norm, self.head)}
        for module in parts[frozen]:
            module.requires_grad_(False)

    def forward(self, image: Tensor, text: Tensor) -> Tensor:
        x_BLD = torch.cat([self.project(self.image(image)), self.tokens(text)], dim=1)
        for layer in self.layers:
            x_BLD = layer(x_BLD, self.rotary)
        return self.head(self.norm(x_BLD)[:, self.num_patches :])
