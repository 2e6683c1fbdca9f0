"""Flamingo (arXiv 2204.14198): a language model whose every N-th layer looks at one picture (OpenFlamingo, 2308.01390).

Shapes: B micro-batch, L tokens, M latent vectors of the picture, D hidden width, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gpp.models.networks.layers import CrossAttention, Mlp, TokenEmbedding, TransformerLayer, divides
from gpp.models.networks.llava import ImageFeatures
from gpp.settings import Count, arguments


class Resampler(nn.Module):
    """Latent vectors that gather what the features say: [B, P, width] -> [B, M, width]."""

    def __init__(self, num_layers: int, width: int, num_heads: int, num_latents: int) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.randn(num_latents, width) * 0.02)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(num_layers))
        self.attentions = nn.ModuleList(CrossAttention(width, num_heads) for _ in range(num_layers))
        self.mlps = nn.ModuleList(nn.Sequential(nn.LayerNorm(width), Mlp(width, 4 * width)) for _ in range(num_layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, features: Tensor) -> Tensor:
        x = self.latents.expand(features.shape[0], -1, -1)
        for norm, attention, mlp in zip(self.norms, self.attentions, self.mlps, strict=True):
            x = x + attention(norm(x), torch.cat([features, x], dim=1))
            x = x + mlp(x)
        return self.norm(x)


class GatedCrossLayer(nn.Module):
    """Attention to the picture and an MLP behind gates that begin half open: [B, L, D], [B, M, width] -> [B, L, D].

    Flamingo's gates begin closed, so that a trained language model begins as it was.
    """

    def __init__(self, hidden: int, num_heads: int, width: int) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(hidden), CrossAttention(hidden, num_heads, context=width)
        self.mlp = nn.Sequential(nn.LayerNorm(hidden), Mlp(hidden, 4 * hidden))
        self.gates = nn.Parameter(torch.full((2,), 0.5))

    def forward(self, x_BLD: Tensor, picture: Tensor) -> Tensor:
        x_BLD = x_BLD + self.gates[0].tanh() * self.attention(self.norm(x_BLD), picture)
        return x_BLD + self.gates[1].tanh() * self.mlp(x_BLD)


class Flamingo(nn.Module):
    """Pixels [B, 3, S, S] and token ids [B, L] -> logits [B, L, V] of the next tokens.

    The picture's latent vectors go to every N-th layer, wherever its stage is. All parts are trained here; Flamingo freezes
    the image tower and the language model.

    Args:
        image_layers, image_hidden, image_heads: layers of the image tower, their width and heads.
        image_size, patch_size: pixels per side.
        latents, resampler_layers: vectors that stand for the picture, and layers that gather them.
        num_layers, hidden, num_heads: layers of the language model, their width and heads; MLPs are four times as wide.
        every: layers of it between two that look at the picture.
        vocabulary, sequence: token ids and their number.
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
        latents: Count,
        resampler_layers: Count,
        num_layers: Count,
        hidden: Count,
        num_heads: Count,
        every: Count,
        vocabulary: Count,
        sequence: Count,
    ) -> None:
        super().__init__()
        divides(image_heads=image_heads, image_hidden=image_hidden)
        divides(patch_size=patch_size, image_size=image_size)
        divides(num_heads=num_heads, hidden=hidden)
        self.every = every
        self.image = ImageFeatures(image_size, patch_size, image_layers, image_hidden, image_heads)
        self.resampler = Resampler(resampler_layers, image_hidden, image_heads, latents)
        self.embed = TokenEmbedding(vocabulary, sequence, hidden)
        self.layers = nn.ModuleList(TransformerLayer(hidden, num_heads, 4 * hidden, causal=True) for _ in range(num_layers))
        self.looks = nn.ModuleList(GatedCrossLayer(hidden, num_heads, image_hidden) for _ in range(num_layers // every))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, vocabulary, bias=False)

    def forward(self, image: Tensor, text: Tensor) -> Tensor:
        picture, x_BLD = self.resampler(self.image(image)), self.embed(text)
        for i, layer in enumerate(self.layers, start=1):
            if i % self.every == 0:
                x_BLD = self.looks[i // self.every - 1](x_BLD, picture)
            x_BLD = layer(x_BLD)
        return self.head(self.norm(x_BLD))
