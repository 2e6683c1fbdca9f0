"""AmoebaNet-D (Real et al., AAAI '19, arXiv 1802.01548), in the form in which GPipe and torchgpipe train it.

A cell reads the two cells before it and adds up pairs of small operations, so the graph of a cell has branches, and every
cut between two cells crosses two tensors. The pairs are those of the paper. What a normal cell concatenates is
[0, 3, 4, 6], as in the authors' TensorFlow code and not [4, 5, 6] as printed: with it the parameters are those that GPipe
publishes (82M, 318M and 542M for 18 cells of 208, 416 and 544 filters).

Shapes: B micro-batch, C channels, S pixels per side at this height.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpp.errors import InvalidConfig
from gpp.settings import Count, arguments

Kind = Literal["same", "conv1", "conv3", "conv7", "max2", "max3", "avg3"]
Pairs = tuple[tuple[tuple[int, Kind], tuple[int, Kind]], ...]

NORMAL: Pairs = (
    ((1, "conv1"), (1, "max3")),
    ((1, "same"), (0, "conv7")),
    ((0, "conv1"), (0, "conv7")),
    ((2, "max3"), (2, "same")),
    ((1, "avg3"), (5, "conv1")),
)
"""Two operations each, and the states they read: 0 is the last cell's output, 1 that of the cell before, 2 the first sum."""

REDUCTION: Pairs = (
    ((0, "max2"), (0, "max3")),
    ((2, "same"), (1, "conv3")),
    ((2, "conv7"), (2, "max3")),
    ((3, "same"), (1, "max2")),
    ((2, "avg3"), (3, "conv1")),
)
JOINED = {False: (0, 3, 4, 6), True: (4, 5, 6)}
"""States that a cell concatenates, of a normal and of a reduction cell."""

HEIGHTS = 32
"""An image is halved five times: by the stem, two reduction cells behind it and two between the normal ones."""


def conv(before: int, behind: int, kernel: int | tuple[int, int] = 1, stride: int | tuple[int, int] = 1) -> list[nn.Module]:
    """ReLU, convolution that keeps the size (divides it by the stride), batch norm."""
    height, width = (kernel, kernel) if isinstance(kernel, int) else kernel
    padding = (height // 2, width // 2)
    return [nn.ReLU(), nn.Conv2d(before, behind, kernel, stride, padding, bias=False), nn.BatchNorm2d(behind)]


def operation(kind: Kind, width: int, stride: int) -> nn.Module:
    """One operation of a cell: [B, C, S, S] -> [B, C, S / stride, S / stride]."""
    narrow = width // 4
    if kind == "conv1":
        return nn.Sequential(*conv(width, width, 1, stride))
    if kind == "conv3":
        return nn.Sequential(*conv(width, narrow), *conv(narrow, narrow, 3, stride), *conv(narrow, width))
    if kind == "conv7":
        middle = [*conv(narrow, narrow, (1, 7), (1, stride)), *conv(narrow, narrow, (7, 1), (stride, 1))]
        return nn.Sequential(*conv(width, narrow), *middle, *conv(narrow, width))
    if kind == "max2":
        return nn.MaxPool2d(2, stride)
    if kind == "max3":
        return nn.MaxPool2d(3, stride, 1)
    if kind == "avg3":
        return nn.AvgPool2d(3, stride, 1, count_include_pad=False)
    return nn.Identity()


class Halve(nn.Module):
    """Half the size by two strided convolutions, one of them shifted by a pixel: [B, C, S, S] -> [B, C', S / 2, S / 2]."""

    def __init__(self, before: int, behind: int) -> None:
        super().__init__()
        self.even = nn.Conv2d(before, behind // 2, 1, 2, bias=False)
        self.odd = nn.Conv2d(before, behind // 2, 1, 2, bias=False)
        self.norm = nn.BatchNorm2d(behind)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(x)
        shifted = F.pad(x[:, :, 1:, 1:], (0, 1, 0, 1))
        return self.norm(torch.cat([self.even(x), self.odd(shifted)], dim=1))


class AmoebaNetCell(nn.Module):
    """Five sums of two operations: the outputs of the last two cells -> [B, width, S, S].

    Args:
        last, before: channels of the two inputs.
        channels: of each state.
        halves: whether it halves the size.
        late: whether the cell between halved the size, so that the older input is twice as large.
    """

    def __init__(self, last: int, before: int, channels: int, halves: bool, late: bool) -> None:
        super().__init__()
        self.enter = nn.Sequential(*conv(last, channels))
        self.enter_before: nn.Module = nn.Identity()
        if late:
            self.enter_before = Halve(before, channels)
        elif before != channels:
            self.enter_before = nn.Sequential(*conv(before, channels))
        pairs = REDUCTION if halves else NORMAL
        self.sources = tuple((a, b) for (a, _), (b, _) in pairs)
        self.operations = nn.ModuleList(
            operation(kind, channels, 2 if halves and source < 2 else 1) for pair in pairs for source, kind in pair
        )
        self.joined = JOINED[halves]
        self.width = channels * len(self.joined)

    def forward(self, last: Tensor, before: Tensor) -> Tensor:
        states = [self.enter(last), self.enter_before(before)]
        for i, (a, b) in enumerate(self.sources):
            states.append(self.operations[2 * i](states[a]) + self.operations[2 * i + 1](states[b]))
        return torch.cat([states[i] for i in self.joined], dim=1)


class AmoebaNet(nn.Module):
    """Pixels [B, 3, S, S] -> logits [B, num_classes]: a stem, two reduction cells, three thirds of normal cells.

    Args:
        num_cells: normal cells, a third at each of three heights.
        num_filters: channels of a state at the first height of normal cells; they double with each reduction.
        image_size: pixels per side.
        num_classes: width of the output.
    """

    @arguments("model")
    def __init__(self, *, num_cells: Count, num_filters: Count, image_size: Count, num_classes: Count) -> None:
        super().__init__()
        for field, value, unit in (
            ("num_cells", num_cells, 3),
            ("num_filters", num_filters, 16),
            ("image_size", image_size, HEIGHTS),
        ):
            if value % unit:
                near = max(round(value / unit), 1) * unit
                raise InvalidConfig(f"model.{field}", value, f"must be a multiple of {unit}", f"set model.{field}={near}")
        channels = num_filters // 4
        self.stem = nn.Sequential(nn.ReLU(), nn.Conv2d(3, channels, 3, 2, 1, bias=False), nn.BatchNorm2d(channels))
        self.cells = nn.ModuleList()
        last = before = channels
        late = False
        third = (False,) * (num_cells // 3)
        for halves in (True, True, *third, True, *third, True, *third):
            channels *= 2 if halves else 1
            cell = AmoebaNetCell(last, before, channels, halves, late)
            self.cells.append(cell)
            last, before, late = cell.width, last, halves
        self.classify = nn.Linear(last, num_classes)

    def forward(self, image: Tensor) -> Tensor:
        last = before = self.stem(image)
        for cell in self.cells:
            last, before = cell(last, before), last
        return self.classify(last.mean((2, 3)))
