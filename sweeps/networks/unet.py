"""The U-Net of Stable Diffusion 1 (CVPR '22, arXiv 2112.10752): down and up again, with a skip edge at every height.

Shapes: B micro-batch, C channels, S pixels per side at this height, L pixels in a row (S x S), T width of the time
embedding.
"""

from __future__ import annotations

from math import log
from typing import Annotated, NamedTuple

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from gpp.errors import InvalidConfig
from gpp.models.networks.layers import CrossAttention, SelfAttention
from gpp.settings import Count, Natural, arguments


class Shared(NamedTuple):
    """Settings of all blocks: attention heads, groups of a norm, widths of the context and of the time embedding."""

    num_heads: int
    num_groups: int
    context: int
    time: int


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

    def __init__(self, before: int, behind: int, shared: Shared) -> None:
        super().__init__()
        groups, self.same = shared.num_groups, before == behind
        self.norm_in, self.norm_out = nn.GroupNorm(groups, before), nn.GroupNorm(groups, behind)
        self.conv_in, self.conv_out = nn.Conv2d(before, behind, 3, padding=1), nn.Conv2d(behind, behind, 3, padding=1)
        self.time = nn.Linear(shared.time, behind)
        if not self.same:
            self.skip = nn.Conv2d(before, behind, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        y = self.conv_in(F.silu(self.norm_in(x))) + self.time(F.silu(time))[:, :, None, None]
        y = self.conv_out(F.silu(self.norm_out(y)))
        return y + (x if self.same else self.skip(x))


class TransformerBlock(nn.Module):
    """Attention between pixels and to the context, then a gated MLP: [B, C, S, S], [B, M, context] -> [B, C, S, S]."""

    def __init__(self, width: int, shared: Shared) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(shared.num_groups, width, eps=1e-6)
        self.enter, self.leave = nn.Conv2d(width, width, 1), nn.Conv2d(width, width, 1)
        self.self_norm, self.self_attention = nn.LayerNorm(width), SelfAttention(width, shared.num_heads)
        if shared.context:
            self.cross_norm = nn.LayerNorm(width)
            self.cross_attention = CrossAttention(width, shared.num_heads, context=shared.context)
        self.mlp_norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 8 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, context: Tensor | None) -> Tensor:
        y_BLC = self.enter(self.norm(x)).flatten(2).transpose(1, 2)
        y_BLC = y_BLC + self.self_attention(self.self_norm(y_BLC))
        if context is not None:
            y_BLC = y_BLC + self.cross_attention(self.cross_norm(y_BLC), context)
        value, gate = self.up(self.mlp_norm(y_BLC)).chunk(2, dim=-1)
        y_BLC = y_BLC + self.down(value * F.gelu(gate))
        return x + self.leave(y_BLC.transpose(1, 2).unflatten(2, x.shape[2:]))


class UNetBlock(nn.Module):
    """A residual block and, where the height attends, a Transformer block."""

    def __init__(self, before: int, behind: int, attends: bool, shared: Shared) -> None:
        super().__init__()
        self.residual = ResidualBlock(before, behind, shared)
        self.transformer = TransformerBlock(behind, shared) if attends else None

    def forward(self, x: Tensor, time: Tensor, context: Tensor | None) -> Tensor:
        x = self.residual(x, time)
        return x if self.transformer is None else self.transformer(x, context)


class UNet(nn.Module):
    """Residual blocks that know the time step, and Transformer blocks that attend to a context; predicts the noise.

    Noisy latents [B, C, S, S], time steps [B], a context [B, M, context] -> the noise [B, C, S, S]. The activations at
    the skips wait until the way up has come back to their height.

    Args:
        size, channels: size of the noisy latent picture [channels, size, size].
        widths: channels at each height; the picture is halved between two.
        num_blocks: residual blocks of a height on the way down; there is one more on the way up.
        attention: for each height, whether its blocks attend.
        num_heads, num_groups: heads of every attention, and groups of every group norm.
        context, context_length: width and number of the vectors to attend to (a text's); 0 and 0 attend to the picture
            alone.
    """

    @arguments("model")
    def __init__(
        self,
        *,
        size: Count,
        channels: Count,
        widths: Annotated[tuple[Count, ...], Field(min_length=1)],
        num_blocks: Count,
        attention: tuple[bool, ...],
        num_heads: Count,
        num_groups: Count,
        context: Natural,
        context_length: Natural,
    ) -> None:
        super().__init__()
        _check(size, widths, attention, num_heads, num_groups)
        if bool(context) != bool(context_length):
            rule = f"must be 0 if and only if model.context_length is, which is {context_length}"
            raise InvalidConfig("model.context", context, rule, "set model.context=0 model.context_length=0")
        first, shared = widths[0], Shared(num_heads, num_groups, context, 4 * widths[0])
        self.time = TimeEmbedding(first, shared.time)
        self.enter = nn.Conv2d(channels, first, 3, padding=1)
        self.down, self.shrink = nn.ModuleList(), nn.ModuleList()
        self.up, self.grow = nn.ModuleList(), nn.ModuleList()
        width, skips = first, [first]
        for i, (wide, attends) in enumerate(zip(widths, attention, strict=True)):
            for _ in range(num_blocks):
                self.down.append(UNetBlock(width, wide, attends, shared))
                width = wide
                skips.append(width)
            if i + 1 < len(widths):
                self.shrink.append(nn.Conv2d(width, width, 3, stride=2, padding=1))
                skips.append(width)
        self.middle = UNetBlock(width, width, True, shared)
        self.middle_out = ResidualBlock(width, width, shared)
        for i, (wide, attends) in reversed(list(enumerate(zip(widths, attention, strict=True)))):
            for _ in range(num_blocks + 1):
                self.up.append(UNetBlock(width + skips.pop(), wide, attends, shared))
                width = wide
            if i:
                self.grow.append(nn.Conv2d(width, width, 3, padding=1))
        self.num_blocks = num_blocks
        self.norm, self.leave = nn.GroupNorm(num_groups, first), nn.Conv2d(first, channels, 3, padding=1)

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


def _check(size: int, widths: tuple[int, ...], attention: tuple[bool, ...], num_heads: int, num_groups: int) -> None:
    """Refuse heights that do not fit each other."""
    if wrong := [width for width in widths if width % num_groups or width % num_heads]:
        rule = f"must be multiples of model.num_heads={num_heads} and of model.num_groups={num_groups}"
        raise InvalidConfig("model.widths", wrong, rule, "multiples of both")
    if len(attention) != len(widths):
        raise InvalidConfig("model.attention", attention, "must say yes or no for each width", "true or false for each")
    if size % 2 ** (len(widths) - 1):
        raise InvalidConfig("model.size", size, "must be halved between any two widths", f"a multiple of {2 ** (len(widths) - 1)}")
