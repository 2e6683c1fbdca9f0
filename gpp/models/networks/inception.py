"""The network of Inception and its loss. Shapes: B micro-batch, C channels, S pixels per side at this height."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if TYPE_CHECKING:
    from gpp.models.inception import Inception

Kernel = int | tuple[int, int]


class Conv(nn.Module):
    """Convolution, norm, ReLU: [B, C in, S, S] -> [B, C out, S, S]."""

    def __init__(self, before: int, behind: int, kernel: Kernel, settings: Inception, *, stride: int = 1, pad: Kernel = 0) -> None:
        super().__init__()
        self.conv = nn.Conv2d(before, behind, kernel, stride, pad, bias=False)
        self.norm = nn.BatchNorm2d(behind, eps=0.001) if settings.norm == "batch" else nn.GroupNorm(1, behind, eps=0.001)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.conv(x)))


class Branch(nn.Sequential):
    """Convolutions one after the other, each (paper's channels, kernel); they keep the size unless `valid`.

    Args:
        first_pool: an average over 3 x 3 pixels before them.
        valid: the last one halves the size.
    """

    def __init__(
        self, before: int, steps: list[tuple[int, Kernel]], settings: Inception, *, first_pool: bool = False, valid: bool = False
    ) -> None:
        layers: list[nn.Module] = [nn.AvgPool2d(3, 1, 1)] if first_pool else []
        for i, (channels, kernel) in enumerate(steps):
            behind = channels // settings.shrink
            halves = valid and i == len(steps) - 1
            pad = 0 if halves else (kernel // 2 if isinstance(kernel, int) else (kernel[0] // 2, kernel[1] // 2))
            layers.append(Conv(before, behind, kernel, settings, stride=2 if halves else 1, pad=pad))
            before = behind
        self.width = before
        super().__init__(*layers)


class Split(nn.Module):
    """A branch that ends in a 1 x 3 beside a 3 x 1 convolution."""

    def __init__(self, stem: Branch, channels: int, settings: Inception) -> None:
        super().__init__()
        self.stem, self.width = stem, 2 * (channels // settings.shrink)
        self.wide = Branch(stem.width, [(channels, (1, 3))], settings)
        self.high = Branch(stem.width, [(channels, (3, 1))], settings)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return torch.cat([self.wide(x), self.high(x)], dim=1)


class Cell(nn.Module):
    """Branches side by side, concatenated: [B, C, S, S] -> [B, C', S', S']; `pool` adds a halving maximum."""

    def __init__(self, before: int, branches: list[Branch | Split], *, pool: bool = False) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)
        self.pool = pool
        self.width = sum(branch.width for branch in branches) + pool * before

    def forward(self, x: Tensor) -> Tensor:
        parts = [branch(x) for branch in self.branches]
        if self.pool:
            parts.append(F.max_pool2d(x, 3, 2))
        return torch.cat(parts, dim=1)


def cells(before: int, settings: Inception) -> list[Cell]:
    """The eleven cells: three A, the halving B, four C, the halving D, two E."""
    made: list[Cell] = []

    def branch(*steps: tuple[int, Kernel], first_pool: bool = False, valid: bool = False) -> Branch:
        width = made[-1].width if made else before
        return Branch(width, list(steps), settings, first_pool=first_pool, valid=valid)

    def add(*branches: Branch | Split, pool: bool = False) -> None:
        made.append(Cell(made[-1].width if made else before, list(branches), pool=pool))

    for pooled in (32, 64, 64):
        add(branch((64, 1)), branch((48, 1), (64, 5)), branch((64, 1), (96, 3), (96, 3)), branch((pooled, 1), first_pool=True))
    add(branch((384, 3), valid=True), branch((64, 1), (96, 3), (96, 3), valid=True), pool=True)
    for n in (128, 160, 160, 192):
        long = branch((n, 1), (n, (7, 1)), (n, (1, 7)), (n, (7, 1)), (192, (1, 7)))
        add(branch((192, 1)), branch((n, 1), (n, (1, 7)), (192, (7, 1))), long, branch((192, 1), first_pool=True))
    add(branch((192, 1), (320, 3), valid=True), branch((192, 1), (192, (1, 7)), (192, (7, 1)), (192, 3), valid=True), pool=True)
    for _ in range(2):
        short, long = Split(branch((384, 1)), 384, settings), Split(branch((448, 1), (384, 3)), 384, settings)
        add(branch((320, 1)), short, long, branch((192, 1), first_pool=True))
    return made


class Auxiliary(nn.Module):
    """The second head: [B, C, S, S] -> logits [B, num_classes]."""

    def __init__(self, before: int, settings: Inception) -> None:
        super().__init__()
        self.narrow = Conv(before, 128 // settings.shrink, 1, settings)
        self.conv = Conv(128 // settings.shrink, 768 // settings.shrink, 5, settings, pad=2)
        self.classify = nn.Linear(768 // settings.shrink, settings.num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.classify(self.conv(self.narrow(F.avg_pool2d(x, 5, 3, ceil_mode=True))).mean((2, 3)))


class InceptionNetwork(nn.Module):
    """Pixels [B, 3, S, S] -> logits [B, num_classes], and `auxiliary` ones where there is a second head."""

    def __init__(self, settings: Inception) -> None:
        super().__init__()
        self.dropout = settings.dropout
        a, b, c, d, e = (channels // settings.shrink for channels in (32, 32, 64, 80, 192))
        first = [Conv(3, a, 3, settings, stride=2), Conv(a, b, 3, settings), Conv(b, c, 3, settings, pad=1)]
        self.stem = nn.Sequential(*first, nn.MaxPool2d(3, 2), Conv(c, d, 1, settings), Conv(d, e, 3, settings), nn.MaxPool2d(3, 2))
        made = cells(e, settings)
        self.cells = nn.ModuleList(made)
        self.auxiliary = Auxiliary(made[7].width, settings) if settings.auxiliary else None
        self.classify = nn.Linear(made[-1].width, settings.num_classes)

    def forward(self, image: Tensor) -> dict[str, Tensor]:
        x, outputs = self.stem(image), {}
        for i, cell in enumerate(self.cells):
            x = cell(x)
            if self.auxiliary is not None and i == 7:
                outputs["auxiliary"] = self.auxiliary(x)
        pooled = x.mean((2, 3))
        pooled = F.dropout(pooled, self.dropout, self.training) if self.dropout else pooled
        return {"logits": self.classify(pooled)} | outputs


def heads_loss(outputs: Mapping[str, Tensor], label: Tensor) -> Tensor:
    """Cross entropy of the classes, and 0.4 times that of the second head where there is one."""
    loss = F.cross_entropy(outputs["logits"], label)
    return loss + 0.4 * F.cross_entropy(outputs["auxiliary"], label) if "auxiliary" in outputs else loss
