"""A stage on one of several devices that share a replica, as a mechanism splits it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gpp.capture.emit import Emitter
from gpp.graph.captured import Node


class HeldPart(NamedTuple):
    """The part of a tensor of sizes `shape` that a device holds: these ranges [lo, hi) of dimension `dim`, one behind the other."""

    shape: tuple[int, ...]
    dim: int
    ranges: Sequence[tuple[int, int]]

    def cut(self, whole: Tensor) -> Tensor:
        """The part of a whole tensor."""
        parts = [whole.narrow(self.dim, lo, hi - lo) for lo, hi in self.ranges]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=self.dim)

    def placed(self, part: Tensor) -> Tensor:
        """A whole tensor, of zeros but for the part."""
        whole, at = part.new_zeros(self.shape), 0
        for lo, hi in self.ranges:
            whole.narrow(self.dim, lo, hi - lo).copy_(part.narrow(self.dim, at, hi - lo))
            at += hi - lo
        return whole


class AbstractShards(ABC):
    """A stage on one of the devices that share a replica: what the device holds of the parameters, by full name, and its code."""

    @property
    @abstractmethod
    def member(self) -> int:
        """Number of the device among those of the replica, from 0."""

    @property
    @abstractmethod
    def split(self) -> Mapping[str, HeldPart]:
        """The parameters of which the device holds a part; it holds all others whole."""

    @abstractmethod
    def sum(self, tensor: Tensor) -> None:
        """Add up a contiguous tensor over the devices of the replica, in place; all of them call it, in one order."""

    @abstractmethod
    def code(self, emitter: Emitter, whole: frozenset[str]) -> tuple[Callable[[Node], None], Callable[[Sequence[str]], None]]:
        """Two functions for the stage's code: one adds a call, the other makes the tensors of these names whole, which leave it.

        Args:
            whole: names of tensors that the stage receives, which are whole.
        """

    def whole(self, name: str, share: Tensor) -> Tensor:
        """The whole of a parameter, or of a tensor that lies like it. All devices of the replica call it."""
        if name not in self.split:
            return share
        out = self.split[name].placed(share)
        self.sum(out)
        return out

    def share(self, name: str, whole: Tensor) -> Tensor:
        """The device's share of a parameter, or of a tensor that lies like it."""
        return self.split[name].cut(whole) if name in self.split else whole
