"""The U-Net of torchgpipe's benchmarks (Kim et al., arXiv 2004.09910): a deep chain of convolutions under long skip edges.

Shapes: B micro-batch, C channels, S pixels per side at this height.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpp.errors import InvalidConfig
from gpp.models.networks.layers import Rate
from gpp.settings import Count, arguments


def convs(before: int, middle: int, behind: int, count: int, dropout: float) -> nn.Sequential:
    """As many times convolution, dropout of channels, instance norm, leaky ReLU: [B, C, S, S] -> [B, C', S, S]."""
    widths = [before, *[middle] * (count - 1), behind]
    layers: list[nn.Module] = []
    for narrow, wide in pairwise(widths):
        layers += [
            nn.Conv2d(narrow, wide, 3, padding=1, bias=False),
            nn.Dropout2d(dropout),
            nn.InstanceNorm2d(wide),
            nn.LeakyReLU(),
        ]
    return nn.Sequential(*layers)


class SegmentationUNet(nn.Module):
    """Pixels [B, 3, S, S] -> a mask's logits [B, 1, S, S]; every height's output waits for the way up.

    Args:
        depth: heights; the image is halved between two.
        num_convs: convolutions at each height, on either way, and at the bottom.
        channels: of the first height; they double with each.
        image_size: pixels per side.
        dropout: rate after each convolution.
    """

    @arguments("model")
    def __init__(self, *, depth: Count, num_convs: Count, channels: Count, image_size: Count, dropout: Rate) -> None:
        super().__init__()
        if image_size % 2**depth:
            rule = f"must be halved model.depth={depth} times"
            raise InvalidConfig("model.image_size", image_size, rule, f"a multiple of {2**depth}")
        if channels % 2:
            raise InvalidConfig("model.channels", channels, "must be even: the last height has half of them", "an even number")
        wide = [channels * 2**i for i in range(depth)]
        self.down = nn.ModuleList(
            convs(before, own, own, num_convs, dropout) for before, own in zip([3, *wide], wide, strict=False)
        )
        self.bottom = convs(wide[-1], 2 * wide[-1], wide[-1], num_convs, dropout)
        self.up = nn.ModuleList(convs(2 * own, own // 2, own // 2, num_convs, dropout) for own in reversed(wide))
        self.leave = nn.Conv2d(channels // 2, 1, 1, bias=False)

    def forward(self, image: Tensor) -> Tensor:
        x, skips = image, []
        for down in self.down:
            x = down(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.bottom(x)
        for up in self.up:
            x = up(torch.cat([F.interpolate(x, scale_factor=2.0), skips.pop()], dim=1))
        return self.leave(x)
