"""Weights of which a worker holds a share: saved whole, under their full names, and read by shares."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import final

import torch

from gpp.capture.shards import AbstractShards
from gpp.runtime.checkpoint.state import Slices


@final
class SplitWeights:
    """The weights of a worker that are shares, and the way to make them whole.

    Args:
        of_team: name of a weight of a stage whose replicas are several devices -> the worker's part of that stage, and whether its
            replica's weights are those that are saved.
    """

    def __init__(self, of_team: Mapping[str, tuple[AbstractShards, bool]]) -> None:
        self._of_team = of_team

    def split(self, name: str) -> bool:
        """Whether the worker holds a share only."""
        return name in self._of_team and name in self._of_team[name][0].split

    def counts(self, name: str) -> bool:
        """Whether the worker counts a weight among those of its replica: its own share, and as the first member what is whole."""
        return name not in self._of_team or self.split(name) or not self._of_team[name][0].member

    def helps(self, name: str) -> bool:
        """Whether the worker takes part in putting a weight together that is to be saved."""
        return self.split(name) and self._of_team[name][1]

    def whole(self, name: str, share: torch.Tensor) -> torch.Tensor:
        """A weight, or a tensor that lies like it, put together; the same tensor where it is no share. All members call it."""
        return self._of_team[name][0].whole(name, share.detach()) if self.split(name) else share

    def whole_shape(self, name: str) -> tuple[int, ...]:
        """Sizes of a split weight, put together."""
        return self._of_team[name][0].split[name].shape

    def share(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """The worker's share of a weight, or of a tensor that lies like it."""
        return self._of_team[name][0].share(name, whole)


@final
class ShareOf(Mapping[str, torch.Tensor]):
    """The initial weights as one device of a replica holds them: of split ones, its share alone is read."""

    def __init__(self, weights: Slices, shards: AbstractShards) -> None:
        self._weights, self._shards = weights, shards

    def __getitem__(self, name: str) -> torch.Tensor:
        part = self._shards.split.get(name)
        return self._weights[name] if part is None else self._weights.part(name, part.dim, part.ranges)

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)
