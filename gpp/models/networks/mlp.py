"""MLP: a chain of equal blocks; and layers side by side. On both of them the cost of a runtime is measured.

Shapes: B micro-batch, D width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpp.settings import Count, arguments


class MLPBlock(nn.Module):
    """[B, D] -> [B, D]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width)

    def forward(self, x_BD: Tensor) -> Tensor:
        return F.relu(self.second(F.relu(self.first(x_BD))))


class MLP(nn.Module):
    """Blocks of two square linear layers, each with a ReLU, equal in time and parameters: x [B, D] -> [B, D].

    Args:
        num_blocks: blocks in a row.
        width: width of every layer, of the input and of the output.
    """

    @arguments("model")
    def __init__(self, *, num_blocks: Count, width: Count) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(MLPBlock(width) for _ in range(num_blocks)))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x)


class Streams(nn.Module):
    """Two layers in a row in each of several streams, which are added up: x [B, D] -> [B, D].

    Between `first` and `second` there is one tensor a stream.

    Args:
        num_streams: streams side by side.
        width: width of every layer, of the input and of the output.
    """

    @arguments("model")
    def __init__(self, *, num_streams: Count, width: Count) -> None:
        super().__init__()
        self.first, self.second = (nn.ModuleList(nn.Linear(width, width) for _ in range(num_streams)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        made = [F.relu(layer(x)) for layer in self.first]
        return torch.stack([layer(own) for layer, own in zip(self.second, made, strict=True)]).sum(dim=0)
