"""The network of UNet.

Shapes: B micro-batch, C channels, S pixels per side at this height, L pixels in a row (S x S), T width of the time embedding.
"""

from __future__ import annotations

from math import log
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpp.models.networks.layers import CrossAttention, SelfAttention

if TYPE_CHECKING:
    from gpp.models.unet import UNet


class TimeEmbedding(nn.Module):
    """Time steps [B] -> [B, T]: waves of many lengths, then an MLP."""

    frequencies: Tensor

    def __init__(self, num_waves: int, width: int) -> None:
        super().__init__()
        self.register_buffer(
            "frequencies", torch.exp(-log(10000.0) * torch.arange(num_waves // 2) / (num_waves // 2)), persistent=False
        )
        self.up, self.out = nn.Linear(num_waves, width), nn.Linear(width, width)

    def forward(self, step: Tensor) -> Tensor:
        angles = step[:, None] * self.frequencies
        return self.out(F.silu(self.up(torch.cat([angles.cos(), angles.sin()], dim=-1))))


class ResidualBlock(nn.Module):
    """[B, C in, S, S], [B, T] -> [B, C out, S, S]."""

    def __init__(self, before: int, behind: int, settings: UNet) -> None:
        super().__init__()
        groups, self.same = settings.num_groups, before == behind
        self.norm_in, self.norm_out = nn.GroupNorm(groups, before), nn.GroupNorm(groups, behind)
        self.conv_in, self.conv_out = nn.Conv2d(before, behind, 3, padding=1), nn.Conv2d(behind, behind, 3, padding=1)
        self.time = nn.Linear(4 * settings.widths[0], behind)
        if not self.same:
            self.skip = nn.Conv2d(before, behind, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        y = self.conv_in(F.silu(self.norm_in(x))) + self.time(F.silu(time))[:, :, None, None]
        y = self.conv_out(F.silu(self.norm_out(y)))
        return y + (x if self.same else self.skip(x))


class TransformerBlock(nn.Module):
    """Attention among the pixels and to the context, then a gated MLP: [B, C, S, S], [B, M, context] -> [B, C, S, S]."""

    def __init__(self, width: int, settings: UNet) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(settings.num_groups, width, eps=1e-6)
        self.enter, self.leave = nn.Conv2d(width, width, 1), nn.Conv2d(width, width, 1)
        self.self_norm, self.self_attention = nn.LayerNorm(width), SelfAttention(width, settings.num_heads)
        if settings.context:
            self.cross_norm = nn.LayerNorm(width)
            self.cross_attention = CrossAttention(width, settings.num_heads, context=settings.context)
        self.mlp_norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 8 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, context: Tensor | None) -> Tensor:
        y_BLC = self.enter(self.norm(x)).flatten(2).transpose(1, 2)
        y_BLC = y_BLC + self.self_attention(self.self_norm(y_BLC))
        if context is not None:
            y_BLC = y_BLC + self.cross_attention(self.cross_norm(y_BLC), context)
        value, gate = self.up(self.mlp_norm(y_BLC)).chunk(2, dim=-1)
        y_BLC = y_BLC + self.down(value * F.gelu(gate))
        return x + self.leave(y_BLC.transpose(1, 2).unflatten(2, x.shape[2:]))


class Block(nn.Module):
    """A residual block and, where the height attends, a Transformer block."""

    def __init__(self, before: int, behind: int, attends: bool, settings: UNet) -> None:
        super().__init__()
        self.residual = ResidualBlock(before, behind, settings)
        self.transformer = TransformerBlock(behind, settings) if attends else None

    def forward(self, x: Tensor, time: Tensor, context: Tensor | None) -> Tensor:
        x = self.residual(x, time)
        return x if self.transformer is None else self.transformer(x, context)


class UNetNetwork(nn.Module):
    """Noisy latents [B, C, S, S], time steps [B], a context [B, M, context] -> the noise [B, C, S, S]."""

    def __init__(self, settings: UNet) -> None:
        super().__init__()
        widths, first = settings.widths, settings.widths[0]
        self.time = TimeEmbedding(first, 4 * first)
        self.enter = nn.Conv2d(settings.channels, first, 3, padding=1)
        self.down, self.shrink = nn.ModuleList(), nn.ModuleList()
        self.up, self.grow = nn.ModuleList(), nn.ModuleList()
        width, skips = first, [first]
        for i, (wide, attends) in enumerate(zip(widths, settings.attention, strict=True)):
            for _ in range(settings.num_blocks):
                self.down.append(Block(width, wide, attends, settings))
                width = wide
                skips.append(width)
            if i + 1 < len(widths):
                self.shrink.append(nn.Conv2d(width, width, 3, stride=2, padding=1))
                skips.append(width)
        self.middle = Block(width, width, True, settings)
        self.middle_out = ResidualBlock(width, width, settings)
        for i, (wide, attends) in reversed(list(enumerate(zip(widths, settings.attention, strict=True)))):
            for _ in range(settings.num_blocks + 1):
                self.up.append(Block(width + skips.pop(), wide, attends, settings))
                width = wide
            if i:
                self.grow.append(nn.Conv2d(width, width, 3, padding=1))
        self.num_blocks = settings.num_blocks
        self.norm, self.leave = nn.GroupNorm(settings.num_groups, first), nn.Conv2d(first, settings.channels, 3, padding=1)

    def forward(self, noisy: Tensor, step: Tensor, context: Tensor | None = None) -> Tensor:
        time, x = self.time(step), self.enter(noisy)
        skips = [x]
        for i, block in enumerate(self.down):
            x = block(x, time, context)
            skips.append(x)
            height, last = divmod(i, self.num_blocks)
            if last == self.num_blocks - 1 and height < len(self.shrink):
                x = self.shrink[height](x)
                skips.append(x)
        x = self.middle_out(self.middle(x, time, context), time)
        for i, block in enumerate(self.up):
            x = block(torch.cat([x, skips.pop()], dim=1), time, context)
            height, last = divmod(i, self.num_blocks + 1)
            if last == self.num_blocks and height < len(self.grow):
                x = self.grow[height](F.interpolate(x, scale_factor=2.0))
        return self.leave(F.silu(self.norm(x)))
