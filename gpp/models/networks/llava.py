"""The network of LLaVA.

Shapes: B micro-batch, L positions (M of the image, then the text's), D hidden width, H heads, C width of a head, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpp.models.networks.layers import Encoder, PatchEmbedding

if TYPE_CHECKING:
    from gpp.models.llava import LLaVA


class Image(nn.Module):
    """Pixels [B, 3, S, S] -> features of the patches [B, M, D of the tower]."""

    def __init__(self, settings: LLaVA) -> None:
        super().__init__()
        hidden, size = settings.image_hidden, (settings.image_size, settings.image_size)
        self.embed = PatchEmbedding(3, size, settings.patch_size, hidden)
        self.norm = nn.LayerNorm(hidden)
        self.encoder = Encoder(settings.image_layers, hidden, settings.image_heads)

    def forward(self, image: Tensor) -> Tensor:
        return self.encoder(self.norm(self.embed(image)))[:, 1:]


class Rotary(nn.Module):
    """Rotates queries and keys by their position: [B, L, 2, H, C] -> the same; one table for all layers."""

    cos: Tensor
    sin: Tensor

    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        frequencies = 10000.0 ** (-torch.arange(0, width, 2) / width)
        angles = torch.outer(torch.arange(length).to(frequencies.dtype), frequencies)[:, None, None]
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * self.cos - b * self.sin, b * self.cos + a * self.sin], dim=-1)


class LlamaLayer(nn.Module):
    """A decoder layer with RMS norms, rotated queries and keys, and a gated MLP: [B, L, D] -> [B, L, D]."""

    def __init__(self, settings: LLaVA) -> None:
        super().__init__()
        hidden, ffn = settings.hidden, settings.ffn
        self.num_heads = settings.num_heads
        self.attention_norm = nn.RMSNorm(hidden, eps=1e-5)
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)
        self.mlp_norm = nn.RMSNorm(hidden, eps=1e-5)
        self.gate, self.up = nn.Linear(hidden, ffn, bias=False), nn.Linear(hidden, ffn, bias=False)
        self.down = nn.Linear(ffn, hidden, bias=False)

    def forward(self, x_BLD: Tensor, rotary: Rotary) -> Tensor:
        x_BLD = x_BLD + self._attend(self.attention_norm(x_BLD), rotary)
        normed = self.mlp_norm(x_BLD)
        return x_BLD + self.down(F.silu(self.gate(normed)) * self.up(normed))

    def _attend(self, x_BLD: Tensor, rotary: Rotary) -> Tensor:
        qkv = self.qkv(x_BLD).unflatten(-1, (3, self.num_heads, -1))
        q, k = rotary(qkv[:, :, :2]).transpose(1, 3).unbind(2)
        y = F.scaled_dot_product_attention(q, k, qkv[:, :, 2].transpose(1, 2), is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class LLaVANetwork(nn.Module):
    """Pixels [B, 3, S, S] and token ids [B, L - M] -> logits [B, L - M, V] of the tokens that follow."""

    def __init__(self, settings: LLaVA) -> None:
        super().__init__()
        hidden, self.num_patches = settings.hidden, (settings.image_size // settings.patch_size) ** 2
        self.image = Image(settings)
        self.project = nn.Sequential(nn.Linear(settings.image_hidden, hidden), nn.GELU(), nn.Linear(hidden, hidden))
        self.tokens = nn.Embedding(settings.vocabulary, hidden)
        self.rotary = Rotary(self.num_patches + settings.text_sequence, hidden // settings.num_heads)
        self.layers = nn.ModuleList(LlamaLayer(settings) for _ in range(settings.num_layers))
        self.norm = nn.RMSNorm(hidden, eps=1e-5)
        self.head = nn.Linear(hidden, settings.vocabulary, bias=False)
        frozen = {"none": (), "image": (self.image,), "towers": (self.image, self.tokens, self.layers, self.norm, self.head)}
        for module in frozen[settings.frozen]:
            module.requires_grad_(False)

    def forward(self, image: Tensor, text: Tensor) -> Tensor:
        x_BLD = torch.cat([self.project(self.image(image)), self.tokens(text)], dim=1)
        for layer in self.layers:
            x_BLD = layer(x_BLD, self.rotary)
        return self.head(self.norm(x_BLD)[:, self.num_patches :])
