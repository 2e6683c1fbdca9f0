"""The layout of a tensor on the devices that share one replica: whole on each of them, or split along one dimension."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from gpp.graph.captured import Captured, Node, evaluate, references

Shape = tuple[int, ...]

BATCH = 1_000_003
"""A prime that stands for the batch size, so that no factor of another size is taken for a part of it."""


class Shard(NamedTuple):
    """A tensor split along dimension `dim`, which consists of `blocks` equal blocks: a member holds its share of each block.

    Example: queries, keys and values lie one behind the other in the 3 D columns of one projection. Split by heads, a member holds
    its heads of each of the three: `Shard(-1, 3)`.
    """

    dim: int
    blocks: int = 1


def fits(shape: Shape, shard: Shard, degree: int) -> bool:
    """Whether every member's share is equally large."""
    return 0 <= shard.dim < len(shape) and shape[shard.dim] % (shard.blocks * degree) == 0 and shard.blocks % BATCH != 0


def slices(extent: int, shard: Shard, degree: int, member: int) -> Iterator[tuple[int, int]]:
    """Ranges [lo, hi) of the split dimension that one member holds, in order.

    Example: `list(slices(12, Shard(0, 2), 2, 1)) == [(3, 6), (9, 12)]`.
    """
    size = extent // shard.blocks
    part = size // degree
    for block in range(shard.blocks):
        lo = block * size + member * part
        yield lo, lo + part


def rows(extent: int, degree: int, member: int) -> tuple[int, int]:
    """Range [lo, hi) of the rows of an embedding table that one member holds; shares differ by one row at most."""
    return extent * member // degree, extent * (member + 1) // degree


def reshaped(shard: Shard, before: Shape, after: Shape, degree: int) -> Shard | None:
    """The same split of the same elements under another shape; None if the other shape has no such dimension."""
    outer = math.prod(before[: shard.dim]) * shard.blocks
    prefix = 1
    for dim, extent in enumerate(after):
        blocks, rest = divmod(outer, prefix)
        if not rest and blocks and extent % blocks == 0 and (extent // blocks) % degree == 0 and extent // blocks >= degree:
            return Shard(dim, blocks) if blocks % BATCH else None
        prefix *= extent
    return None


class Nodes:
    """The nodes of a captured model with their shapes and their readers, for `degree` devices that share a replica."""

    def __init__(self, captured: Captured, degree: int) -> None:
        self.captured, self.node_of, self.degree = captured, captured.node_of, degree
        self._batch = captured.batch or BATCH
        self._shapes: dict[str, Shape | None] = {}
        self.readers: dict[str, list[Node]] = {node.name: [] for node in captured.nodes}
        for node in captured.nodes:
            for name in dict.fromkeys(references([*node.args, *node.kwargs.values()])):
                self.readers[name].append(node)

    def shape(self, name: str) -> Shape:
        """Sizes of a node's value, with `BATCH` for the batch size; empty for a tuple of tensors."""
        if name not in self._shapes:
            found = self.node_of[name].shape
            self._shapes[name] = None if found is None else tuple(int(evaluate(extent, self._batch)) for extent in found)
        return self._shapes[name] or ()
