"""AlexNet, VGG, ResNet and GoogLeNet: chains of convolutions on which methods of pipelining are published.

Shapes: B micro-batch, C channels, S pixels per side at this height.
"""

from __future__ import annotations

from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from gpp.errors import InvalidConfig
from gpp.models.networks.layers import Rate
from gpp.settings import Count, arguments

SMALLEST = {"alexnet": 63, "vgg": 32, "resnet": 32, "googlenet": 32}
"""The fewest pixels per side of an image, by kind; they leave one pixel at the top."""

# Channels at each height of VGG's convolutions, of ResNet's bottlenecks and of GoogLeNet's cells. A cell has five
# numbers for its convolutions (1 x 1; narrow, 3 x 3; narrow, 3 x 3) and one behind its maximum. The paper has 5 x 5 for
# the second 3 x 3; the weights that are in use have 3 x 3, which makes 6.62M parameters.
VGG = (64, 128, 256, 512, 512)
RESNET = (64, 128, 256, 512)
GOOGLENET = (
    ((64, 96, 128, 16, 32, 32), (128, 128, 192, 32, 96, 64)),
    (
        (192, 96, 208, 16, 48, 64),
        (160, 112, 224, 24, 64, 64),
        (128, 128, 256, 24, 64, 64),
        (112, 144, 288, 32, 64, 64),
        (256, 160, 320, 32, 128, 128),
    ),
    ((256, 160, 320, 32, 128, 128), (384, 192, 384, 48, 128, 128)),
)


def conv(before: int, behind: int, kernel: int, norm: str, *, stride: int = 1, relu: bool = True) -> nn.Sequential:
    """Convolution that keeps the size (divides it by `stride`), norm, ReLU: [B, C, S, S] -> [B, C', S', S']."""
    normed = nn.BatchNorm2d(behind) if norm == "batch" else nn.GroupNorm(1, behind)
    return nn.Sequential(nn.Conv2d(before, behind, kernel, stride, kernel // 2, bias=False), normed, *([nn.ReLU()] if relu else []))


class Bottleneck(nn.Module):
    """Three convolutions beside a shortcut: [B, C, S, S] -> [B, 4 width, S', S']."""

    def __init__(self, before: int, width: int, norm: str, stride: int) -> None:
        super().__init__()
        self.narrow = conv(before, width, 1, norm)
        self.middle = conv(width, width, 3, norm, stride=stride)
        self.widen = conv(width, 4 * width, 1, norm, relu=False)
        same = before == 4 * width and stride == 1
        self.shortcut = None if same else conv(before, 4 * width, 1, norm, stride=stride, relu=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.widen(self.middle(self.narrow(x)))
        return F.relu(y + (x if self.shortcut is None else self.shortcut(x)))


class GoogLeNetCell(nn.Module):
    """GoogLeNet's four branches side by side, concatenated: [B, C, S, S] -> [B, C', S, S]."""

    def __init__(self, before: int, channels: tuple[int, ...], norm: str) -> None:
        super().__init__()
        single, narrow, wide, narrower, less, pooled = channels
        self.width = single + wide + less + pooled
        self.branches = nn.ModuleList(
            [
                conv(before, single, 1, norm),
                nn.Sequential(conv(before, narrow, 1, norm), conv(narrow, wide, 3, norm)),
                nn.Sequential(conv(before, narrower, 1, norm), conv(narrower, less, 3, norm)),
                nn.Sequential(nn.MaxPool2d(3, 1, 1), conv(before, pooled, 1, norm)),
            ]
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], dim=1)


def alexnet(image_size: int, shrink: int, dropout: float) -> tuple[list[nn.Module], int]:
    """Five convolutions, two linear layers; returned with the width at the end, as by the functions below."""
    a, b, c, d, e = (channels // shrink for channels in (64, 192, 384, 256, 256))
    layers: list[nn.Module] = [nn.Conv2d(3, a, 11, 4, 2), nn.ReLU(), nn.MaxPool2d(3, 2)]
    layers += [nn.Conv2d(a, b, 5, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2)]
    for before, behind in ((b, c), (c, d), (d, e)):
        layers += [nn.Conv2d(before, behind, 3, padding=1), nn.ReLU()]
    side = (image_size - 7) // 4 + 1
    for _ in range(3):
        side = (side - 1) // 2
    return [*layers, nn.MaxPool2d(3, 2), *linear(e * side**2, 4096 // shrink, dropout)], 4096 // shrink


def vgg(blocks: tuple[int, ...], image_size: int, shrink: int, dropout: float) -> tuple[list[nn.Module], int]:
    """Convolutions of 3 x 3 at five heights, two linear layers."""
    layers: list[nn.Module] = []
    before = 3
    for channels, count in zip(VGG, blocks, strict=True):
        for _ in range(count):
            behind = channels // shrink
            layers += [nn.Conv2d(before, behind, 3, padding=1), nn.ReLU()]
            before = behind
        layers.append(nn.MaxPool2d(2, 2))
    return [*layers, *linear(before * (image_size // 32) ** 2, 4096 // shrink, dropout)], 4096 // shrink


def linear(before: int, width: int, dropout: float) -> list[nn.Module]:
    """The two linear layers of AlexNet and VGG: [B, C, S, S] -> [B, width]."""
    layers: list[nn.Module] = [nn.Flatten()]
    for narrow in (before, width):
        layers += [nn.Linear(narrow, width), nn.ReLU(), *dropped(dropout)]
    return layers


def dropped(rate: float) -> list[nn.Module]:
    """Dropout, where the rate is above 0."""
    return [nn.Dropout(rate)] if rate else []


def resnet(blocks: tuple[int, ...], shrink: int, norm: str) -> tuple[list[nn.Module], int]:
    """Bottlenecks at four heights."""
    before = 64 // shrink
    layers: list[nn.Module] = [conv(3, before, 7, norm, stride=2), nn.MaxPool2d(3, 2, 1)]
    for height, (channels, count) in enumerate(zip(RESNET, blocks, strict=True)):
        for block in range(count):
            width = channels // shrink
            layers.append(Bottleneck(before, width, norm, 2 if height and not block else 1))
            before = 4 * width
    return [*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten()], before


def googlenet(shrink: int, norm: str, dropout: float) -> tuple[list[nn.Module], int]:
    """Nine cells at three heights."""
    first, before = 64 // shrink, 192 // shrink
    pool = (3, 2, 0, 1, False, True)  # rounds up
    layers: list[nn.Module] = [conv(3, first, 7, norm, stride=2), nn.MaxPool2d(*pool), conv(first, first, 1, norm)]
    layers += [conv(first, before, 3, norm), nn.MaxPool2d(*pool)]
    for height, cells in enumerate(GOOGLENET):
        if height:
            layers.append(nn.MaxPool2d(*(pool if height == 1 else (2, 2, 0, 1, False, True))))
        for channels in cells:
            cell = GoogLeNetCell(before, tuple(c // shrink for c in channels), norm)
            layers.append(cell)
            before = cell.width
    return [*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), *dropped(dropout)], before


class ConvNet(nn.Module):
    """Torchvision's network of a kind, without its auxiliary heads: pixels [B, 3, S, S] -> logits [B, num_classes].

    With batch norm (ResNet, GoogLeNet) a plan's statistics are those of its micro-batches; `norm: group` (one group)
    leaves the samples independent.

    Args:
        kind: the network.
        blocks: blocks at each height: convolutions of VGG (five heights), bottlenecks of ResNet (four); empty for the
            others.
        image_size: pixels per side.
        num_classes: width of the output.
        shrink: divisor of the paper's channels (16 or more) and of the width of its linear layers.
        norm: `batch` or `group`, after each convolution of ResNet and GoogLeNet.
        dropout: rate after each linear layer but the last, GoogLeNet's before its only one; ResNet has none.
    """

    @arguments("model")
    def __init__(
        self,
        *,
        kind: Literal["alexnet", "vgg", "resnet", "googlenet"],
        blocks: tuple[Count, ...],
        image_size: Count,
        num_classes: Count,
        shrink: Annotated[int, Field(ge=1, le=16)],
        norm: Literal["batch", "group"],
        dropout: Rate,
    ) -> None:
        super().__init__()
        heights = {"vgg": 5, "resnet": 4}.get(kind, 0)
        if len(blocks) != heights:
            rule = f"must be {heights} integers of at least 1 for model.kind={kind}"
            raise InvalidConfig("model.blocks", list(blocks), rule, f"set model.blocks={[1] * heights}")
        if image_size < SMALLEST[kind]:
            rule = f"must be at least {SMALLEST[kind]}, so that a pixel is left at the top"
            raise InvalidConfig("model.image_size", image_size, rule, f"set model.image_size={SMALLEST[kind]}")
        layers, width = {
            "alexnet": lambda: alexnet(image_size, shrink, dropout),
            "vgg": lambda: vgg(blocks, image_size, shrink, dropout),
            "resnet": lambda: resnet(blocks, shrink, norm),
            "googlenet": lambda: googlenet(shrink, norm, dropout),
        }[kind]()
        self.layers = nn.Sequential(*layers)
        self.classify = nn.Linear(width, num_classes)

    def forward(self, image: Tensor) -> Tensor:
        return self.classify(self.layers(image))
