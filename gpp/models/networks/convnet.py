"""The networks of ConvNet. Shapes: B micro-batch, C channels, S pixels per side at this height."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if TYPE_CHECKING:
    from gpp.models.convnet import ConvNet

# Channels at each height: of VGG's convolutions, of ResNet's bottlenecks, of GoogLeNet's cells. A cell has five numbers for its
# convolutions (1 x 1; narrow, 3 x 3; narrow, 3 x 3) and one behind its maximum. The paper has 5 x 5 for the second 3 x 3; the
# weights that are in use have 3 x 3, which makes 6.62M parameters.
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


class Cell(nn.Module):
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


def alexnet(settings: ConvNet) -> tuple[list[nn.Module], int]:
    """Five convolutions, two linear layers; returned with the width at the end, as by the functions below."""
    a, b, c, d, e = (channels // settings.shrink for channels in (64, 192, 384, 256, 256))
    layers: list[nn.Module] = [nn.Conv2d(3, a, 11, 4, 2), nn.ReLU(), nn.MaxPool2d(3, 2)]
    layers += [nn.Conv2d(a, b, 5, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2)]
    for before, behind in ((b, c), (c, d), (d, e)):
        layers += [nn.Conv2d(before, behind, 3, padding=1), nn.ReLU()]
    side = (settings.image_size - 7) // 4 + 1
    for _ in range(3):
        side = (side - 1) // 2
    return [*layers, nn.MaxPool2d(3, 2), *linear(settings, e * side**2)], 4096 // settings.shrink


def vgg(settings: ConvNet) -> tuple[list[nn.Module], int]:
    """Convolutions of 3 x 3 at five heights, two linear layers."""
    layers: list[nn.Module] = []
    before = 3
    for channels, count in zip(VGG, settings.blocks, strict=True):
        for _ in range(count):
            behind = channels // settings.shrink
            layers += [nn.Conv2d(before, behind, 3, padding=1), nn.ReLU()]
            before = behind
        layers.append(nn.MaxPool2d(2, 2))
    return [*layers, *linear(settings, before * (settings.image_size // 32) ** 2)], 4096 // settings.shrink


def linear(settings: ConvNet, before: int) -> list[nn.Module]:
    """The two linear layers of AlexNet and VGG: [B, C, S, S] -> [B, 4096]."""
    width = 4096 // settings.shrink
    layers: list[nn.Module] = [nn.Flatten()]
    for narrow in (before, width):
        layers += [nn.Linear(narrow, width), nn.ReLU(), *dropped(settings)]
    return layers


def dropped(settings: ConvNet) -> list[nn.Module]:
    """Dropout, where there is one."""
    return [nn.Dropout(settings.dropout)] if settings.dropout else []


def resnet(settings: ConvNet) -> tuple[list[nn.Module], int]:
    """Bottlenecks at four heights."""
    before = 64 // settings.shrink
    layers: list[nn.Module] = [conv(3, before, 7, settings.norm, stride=2), nn.MaxPool2d(3, 2, 1)]
    for height, (channels, count) in enumerate(zip(RESNET, settings.blocks, strict=True)):
        for block in range(count):
            width = channels // settings.shrink
            layers.append(Bottleneck(before, width, settings.norm, 2 if height and not block else 1))
            before = 4 * width
    return [*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten()], before


def googlenet(settings: ConvNet) -> tuple[list[nn.Module], int]:
    """Nine cells at three heights."""
    norm, before = settings.norm, 192 // settings.shrink
    first, pool = 64 // settings.shrink, (3, 2, 0, 1, False, True)  # rounds up
    layers: list[nn.Module] = [conv(3, first, 7, norm, stride=2), nn.MaxPool2d(*pool), conv(first, first, 1, norm)]
    layers += [conv(first, before, 3, norm), nn.MaxPool2d(*pool)]
    for height, cells in enumerate(GOOGLENET):
        if height:
            layers.append(nn.MaxPool2d(*(pool if height == 1 else (2, 2, 0, 1, False, True))))
        for channels in cells:
            cell = Cell(before, tuple(c // settings.shrink for c in channels), norm)
            layers.append(cell)
            before = cell.width
    return [*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), *dropped(settings)], before


KINDS = {"alexnet": alexnet, "vgg": vgg, "resnet": resnet, "googlenet": googlenet}


class ConvNetNetwork(nn.Module):
    """Pixels [B, 3, S, S] -> logits [B, num_classes]."""

    def __init__(self, settings: ConvNet) -> None:
        super().__init__()
        layers, width = KINDS[settings.kind](settings)
        self.layers = nn.Sequential(*layers)
        self.classify = nn.Linear(width, settings.num_classes)

    def forward(self, image: Tensor) -> Tensor:
        return self.classify(self.layers(image))
