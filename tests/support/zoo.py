"""Models and data sets that misbehave, by dotted path."""

from __future__ import annotations

import os
import time
from contextlib import suppress

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset


class Towers(nn.Module):
    """Two towers with batch norm and a head: x [B, 8] -> [B, 1]."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 16))
        self.right = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16))
        self.head = nn.Linear(32, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.cat([self.left(x), self.right(x)], -1)).squeeze(-1)


class Dropping(nn.Module):
    """Two pairs of layers, each a pair of columns and rows, with dropout between them: x [B, 8] -> [B, 1]."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)) for _ in range(2))
        self.drop, self.head = nn.Dropout(0.5), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.drop(self.first(x)))).squeeze(-1)


class Ending(Towers):
    """Sends this process the signal whose number is in ENDING, if it is set: the run is then being captured."""

    def __init__(self) -> None:
        super().__init__()
        if number := os.environ.get("ENDING"):
            os.kill(os.getpid(), int(number))
            time.sleep(60)


class Swallowing(Ending):
    """A class that goes on whatever is raised, as libraries do that try what they may import."""

    def __init__(self) -> None:
        with suppress(BaseException):
            super().__init__()
        Towers.__init__(self)


class Leaving(Towers):
    """Ends the process that builds it, as if all were well."""

    def __init__(self) -> None:
        super().__init__()
        raise SystemExit(0)


class FixedBatch(nn.Module):
    """Two layers whose code holds the batch size as a number."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        size = int(x.shape[0])
        hidden = self.second(torch.tanh(self.first(x)))
        return self.third(hidden.reshape(size, 4, 4).reshape(size, 16)).squeeze(-1)


class Undecided(nn.Module):
    """Control flow that depends on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        if x.sum().item() > 0:
            return self.layer(x).squeeze(-1)
        return self.layer(-x).squeeze(-1)


class Samples(Dataset):
    """Samples (x [8], y) of a linear relation; `broken` raises when it is read."""

    def __init__(self, num_samples: int = 128, broken: bool = False, split: str = "train") -> None:
        generator = torch.Generator().manual_seed(len(split))
        self.x = torch.randn(num_samples, 8, generator=generator)
        self.broken = broken

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if self.broken:
            raise OSError("the disk with the samples is gone")
        return self.x[index], self.x[index].sum() * 0.3
