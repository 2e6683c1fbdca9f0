"""Inception-v3 (CVPR '16, arXiv 1512.00567) and its loss: every cell has branches too short to be worth a stage.

Shapes: B micro-batch, C channels, S pixels per side at this height.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, NamedTuple

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from gpp.models.networks.layers import Rate
from gpp.settings import Count, arguments

Kernel = int | tuple[int, int]
Norm = Literal["batch", "group"]


class ConvScale(NamedTuple):
    """Settings of all convolutions: `shrink` divides the paper's channels, and `norm` follows each."""

    shrink: int
    norm: Norm


class Conv(nn.Module):
    """Convolution, norm, ReLU: [B, C in, S, S] -> [B, C out, S, S]."""

    def __init__(self, before: int, behind: int, kernel: Kernel, norm: Norm, *, stride: int = 1, pad: Kernel = 0) -> None:
        super().__init__()
        self.conv = nn.Conv2d(before, behind, kernel, stride, pad, bias=False)
        self.norm = nn.BatchNorm2d(behind, eps=0.001) if norm == "batch" else nn.GroupNorm(1, behind, eps=0.001)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.conv(x)))


class ConvBranch(nn.Sequential):
    """Convolutions one after the other, each (paper's channels, kernel); they keep the size unless `valid`.

    Args:
        first_pool: whether an average over 3 x 3 pixels comes before them.
        valid: whether the last one halves the size.
    """

    def __init__(
        self, before: int, steps: list[tuple[int, Kernel]], scale: ConvScale, *, first_pool: bool = False, valid: bool = False
    ) -> None:
        layers: list[nn.Module] = [nn.AvgPool2d(3, 1, 1)] if first_pool else []
        for i, (channels, kernel) in enumerate(steps):
            behind = channels // scale.shrink
            halves = valid and i == len(steps) - 1
            pad = 0 if halves else (kernel // 2 if isinstance(kernel, int) else (kernel[0] // 2, kernel[1] // 2))
            layers.append(Conv(before, behind, kernel, scale.norm, stride=2 if halves else 1, pad=pad))
            before = behind
        self.width = before
        super().__init__(*layers)


class SplitBranch(nn.Module):
    """A branch that ends in a 1 x 3 beside a 3 x 1 convolution."""

    def __init__(self, stem: ConvBranch, channels: int, scale: ConvScale) -> None:
        super().__init__()
        self.stem, self.width = stem, 2 * (channels // scale.shrink)
        self.wide = ConvBranch(stem.width, [(channels, (1, 3))], scale)
        self.high = ConvBranch(stem.width, [(channels, (3, 1))], scale)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return torch.cat([self.wide(x), self.high(x)], dim=1)


class InceptionCell(nn.Module):
    """Branches side by side, concatenated: [B, C, S, S] -> [B, C', S', S']; `pool` adds a halving maximum."""

    def __init__(self, before: int, branches: list[ConvBranch | SplitBranch], *, pool: bool = False) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)
        self.pool = pool
        self.width = sum(branch.width for branch in branches) + pool * before

    def forward(self, x: Tensor) -> Tensor:
        parts = [branch(x) for branch in self.branches]
        if self.pool:
            parts.append(F.max_pool2d(x, 3, 2))
        return torch.cat(parts, dim=1)


def cells(before: int, scale: ConvScale) -> list[InceptionCell]:
    """The eleven cells: three A, the halving B, four C, the halving D, two E."""
    made: list[InceptionCell] = []

    def branch(*steps: tuple[int, Kernel], first_pool: bool = False, valid: bool = False) -> ConvBranch:
        width = made[-1].width if made else before
        return ConvBranch(width, list(steps), scale, first_pool=first_pool, valid=valid)

    def add(*branches: ConvBranch | SplitBranch, pool: bool = False) -> None:
        made.append(InceptionCell(made[-1].width if made else before, list(branches), pool=pool))

    for pooled in (32, 64, 64):
        add(branch((64, 1)), branch((48, 1), (64, 5)), branch((64, 1), (96, 3), (96, 3)), branch((pooled, 1), first_pool=True))
    add(branch((384, 3), valid=True), branch((64, 1), (96, 3), (96, 3), valid=True), pool=True)
    for n in (128, 160, 160, 192):
        long = branch((n, 1), (n, (7, 1)), (n, (1, 7)), (n, (7, 1)), (192, (1, 7)))
        add(branch((192, 1)), branch((n, 1), (n, (1, 7)), (192, (7, 1))), long, branch((192, 1), first_pool=True))
    add(branch((192, 1), (320, 3), valid=True), branch((192, 1), (192, (1, 7)), (192, (7, 1)), (192, 3), valid=True), pool=True)
    for _ in range(2):
        short, long = SplitBranch(branch((384, 1)), 384, scale), SplitBranch(branch((448, 1), (384, 3)), 384, scale)
        add(branch((320, 1)), short, long, branch((192, 1), first_pool=True))
    return made


class Auxiliary(nn.Module):
    """The second head: [B, C, S, S] -> logits [B, num_classes]."""

    def __init__(self, before: int, scale: ConvScale, num_classes: int) -> None:
        super().__init__()
        narrow, wide = 128 // scale.shrink, 768 // scale.shrink
        self.narrow = Conv(before, narrow, 1, scale.norm)
        self.conv = Conv(narrow, wide, 5, scale.norm, pad=2)
        self.classify = nn.Linear(wide, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.classify(self.conv(self.narrow(F.avg_pool2d(x, 5, 3, ceil_mode=True))).mean((2, 3)))


class Inception(nn.Module):
    """The cells of torchvision's Inception-v3.

    Pixels [B, 3, S, S] -> logits [B, num_classes], and `auxiliary` ones where there is a second head. With batch norm a
    plan's statistics are those of its micro-batches (of a replica's share), so its loss and weights are not those of
    one device with the whole mini-batch. `norm: group` (one group) leaves the samples independent.

    Args:
        image_size: pixels per side; at least 75, so that a pixel is left after five halvings.
        num_classes: width of the output.
        shrink: divisor of the paper's channels (32 or more).
        norm: `batch` or `group`, after each convolution.
        auxiliary: whether the second head, half-way up, is trained too; its loss counts 0.4, as in the paper.
        dropout: rate before the last layer.
    """

    @arguments("model")
    def __init__(
        self,
        *,
        image_size: Annotated[int, Field(ge=75)],
        num_classes: Count,
        shrink: Annotated[int, Field(ge=1, le=32)],
        norm: Norm,
        auxiliary: bool,
        dropout: Rate,
    ) -> None:
        super().__init__()
        self.dropout, scale = dropout, ConvScale(shrink, norm)
        a, b, c, d, e = (channels // shrink for channels in (32, 32, 64, 80, 192))
        first = [Conv(3, a, 3, norm, stride=2), Conv(a, b, 3, norm), Conv(b, c, 3, norm, pad=1)]
        self.stem = nn.Sequential(*first, nn.MaxPool2d(3, 2), Conv(c, d, 1, norm), Conv(d, e, 3, norm), nn.MaxPool2d(3, 2))
        made = cells(e, scale)
        self.cells = nn.ModuleList(made)
        self.auxiliary = Auxiliary(made[7].width, scale, num_classes) if auxiliary else None
        self.classify = nn.Linear(made[-1].width, num_classes)

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
