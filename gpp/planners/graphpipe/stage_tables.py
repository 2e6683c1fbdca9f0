"""What the dynamic program asks of the stages inside a chain: their seconds, and how far the longest one within a limit reaches."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from gpp.planners.graphpipe.sp_structure import SeriesChain, SPStructure

SMALL_CHAIN = 16
"""Pieces up to which the tables of all micro-batch sizes, and of all chains of as many pieces, are made together."""


class _StageTable(NamedTuple):
    """Seconds of the stages inside chains, infinite where none is, and the longest pipeline that fits (None if all do).

    Both have the shape [C, B, k + 1, k + 1], for C chains of k pieces and B micro-batch sizes.
    """

    seconds: np.ndarray
    depth: np.ndarray | None


@dataclass(slots=True)
class _Alike:
    """Chains whose tables are made together: a large one alone, small ones with all that have as many pieces.

    Args:
        tables: by micro-batch sizes and number of replicas.
        ends: by number of replicas, for each chain (`StageTables._furthest`).
    """

    chains: list[SeriesChain]
    tables: dict[tuple[tuple[int, ...], int], _StageTable] = field(default_factory=dict)
    ends: dict[int, list[np.ndarray]] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Pieces of each chain."""
        return len(self.chains[0].bounds) - 1

    @property
    def small(self) -> bool:
        return self.size <= SMALL_CHAIN

    @property
    def bounds(self) -> np.ndarray:
        """Positions in the linear order at which pieces begin or end, of shape [C, k + 1]."""
        return np.array([chain.bounds for chain in self.chains])


def _alike(root: SeriesChain) -> list[_Alike]:
    """All chains of a structure."""
    small: dict[int, _Alike] = {}
    out, pending = list[_Alike](), [root]
    while pending:
        chain = pending.pop()
        pending += [branch for block in chain.blocks.values() for branch in block.chains]
        own = _Alike([chain])
        if not own.small:
            out.append(own)
        elif own.size in small:
            small[own.size].chains.append(chain)
        else:
            small[own.size] = own
    return [*out, *small.values()]


@dataclass(frozen=True, slots=True)
class Lanes:
    """Micro-batch sizes and limits in seconds, arrays of shape [L]."""

    sizes: np.ndarray
    limits_s: np.ndarray

    def __len__(self) -> int:
        return len(self.sizes)

    def pick(self, which: np.ndarray) -> Lanes:
        """Those of some numbers."""
        return Lanes(self.sizes[which], self.limits_s[which])


class StageTables:
    """The stages inside the chains of a structure, for the lanes that are being solved.

    Args:
        max_depth: of a pipeline.
        depth_scale: as `PartitionSearch` has it.
    """

    def __init__(self, structure: SPStructure, max_depth: int, depth_scale: float) -> None:
        self.structure, self.costs, self.max_depth, self.depth_scale = structure, structure.costs, max_depth, depth_scale
        self.lanes = Lanes(np.zeros(0, int), np.zeros(0))
        self._alike = {id(chain): (alike, c) for alike in _alike(structure.root) for c, chain in enumerate(alike.chains)}

    def begin(self, lanes: Lanes) -> None:
        """Go over to other lanes."""
        self.lanes = lanes
        for alike, _ in self._alike.values():
            alike.ends.clear()

    def stage_s(self, chain: SeriesChain, microbatch_size: int, num_replicas: int) -> np.ndarray:
        """Seconds of every stage inside a chain, by its first and one-past-last piece."""
        alike, c = self._alike[id(chain)]
        sizes = self.costs.microbatch_sizes if alike.small else (microbatch_size,)
        return self._stages(alike, sizes, num_replicas).seconds[c, sizes.index(microbatch_size)]

    def _stages(self, alike: _Alike, sizes: tuple[int, ...], r: int) -> _StageTable:
        """The stages inside chains."""
        if (sizes, r) not in alike.tables:
            # Of small chains those with all numbers of replicas are made together: the cost is in the calls.
            every = sorted({r for b in sizes for r in self.costs.replicas[b]}) if alike.small else [r]
            alike.tables.update(zip([(sizes, own) for own in every], self._made(alike, sizes, every), strict=True))
        return alike.tables[sizes, r]

    def _made(self, alike: _Alike, sizes: tuple[int, ...], replicas: list[int]) -> Iterator[_StageTable]:
        """`_stages` for each number of replicas."""
        at, table, costs = alike.bounds, self.structure.intervals, self.costs
        divides = np.array([[b % r == 0 for b in sizes] for r in replicas])
        samples = np.array([[max(b // r, 1) for b in sizes] for r in replicas])[:, None, :, None, None]
        most = np.array([costs.problem.minibatch_size // b for b in sizes])[:, None, None]
        rows = np.array([[costs.row(b // r) if b % r == 0 else 0 for b in sizes] for r in replicas])
        prefix = table.prefix_s[rows[:, None, :, None], at[:, None]]
        amounts = table.amounts.take((at[:, None, :, None], at[:, None, None]))
        once = amounts.once * (samples / costs.link.bandwidth_bytes_per_s)
        seconds = np.maximum(prefix[..., None, :] - prefix[..., None], once)
        seconds += np.array([costs.finish_array_s(amounts.trainable, r) for r in replicas]) / most
        memory, holds = amounts.held(samples, costs.problem.regime.assumed_copies), costs.problem.regime.holds
        deepest = np.clip(holds.full(math.ceil(self.max_depth * self.depth_scale), most), 1, None)
        depth = None
        if not (memory.peak(deepest) <= costs.limit_bytes).all():
            fits = memory.depth(costs.limit_bytes, deepest)
            reach = holds.furthest(fits, deepest, self.max_depth)
            scaled = np.where(reach > 0, np.maximum(reach / max(self.depth_scale, 1e-9), 1.0), 0.0)
            depth = np.where(fits >= deepest, self.max_depth, np.minimum(scaled, self.max_depth)).astype(np.int16)
            seconds[depth <= 0] = np.inf
        seconds[..., np.tri(at.shape[1], dtype=bool)] = np.inf
        seconds[np.broadcast_to(~divides[:, None], seconds.shape[:3])] = np.inf
        for n, own in enumerate(seconds):
            shallow = depth is not None and (depth[n][np.isfinite(own)] < self.max_depth).any()
            yield _StageTable(own, depth[n] if depth is not None and shallow else None)

    def _furthest(self, alike: _Alike, r: int) -> list[np.ndarray]:
        """Of each chain the end of the longest stage from each piece within the limits of the lanes.

        Of shape [k, L], or [k, L, H] where memory asks for shallow ones. Where there is none, the piece itself.
        """
        k, lanes = alike.size, self.lanes
        out = [np.zeros((k, len(lanes)), np.int32) for _ in alike.chains]
        for group in [self.costs.microbatch_sizes] if alike.small else [(b,) for b in dict.fromkeys(lanes.sizes.tolist())]:
            seconds, depth = self._stages(alike, group, r)
            mine = np.arange(len(lanes)) if alike.small else np.flatnonzero(lanes.sizes == group)
            which = np.searchsorted(group, lanes.sizes[mine])
            within = seconds[:, which, :k, :0:-1] <= lanes.limits_s[mine, None, None]
            ends = _last(within, 3)
            for c, own in enumerate(ends):
                deep = np.zeros(0, int)
                if depth is not None:
                    # Most limits bind before the memory does; only where memory decides do depths get their own ends.
                    pieces = np.arange(k)[:, None]
                    deep = np.flatnonzero(((depth[c, which, pieces, own] < self.max_depth) & (own > pieces)).any(axis=0))
                if len(deep) and out[c].ndim == 2:
                    out[c] = np.repeat(out[c][:, :, None], self.max_depth, axis=2)
                out[c][:, mine] = own if out[c].ndim == 2 else own[:, :, None]
                if depth is not None and len(deep):
                    allowed = depth[c, which[deep], :k, :0:-1][..., None] >= np.arange(1, self.max_depth + 1)
                    out[c][:, mine[deep]] = _last(within[c, deep][..., None] & allowed, 2)
        return out

    def ends(self, chain: SeriesChain, lanes: np.ndarray, r: int) -> np.ndarray:
        """`_furthest` of a chain for some of the lanes being solved, some of them several times."""
        alike, c = self._alike[id(chain)]
        if r not in alike.ends:
            alike.ends[r] = self._furthest(alike, r)
        found = alike.ends[r][c]
        return found if len(lanes) == found.shape[1] else found[:, lanes]


def _last(within: np.ndarray, axis: int) -> np.ndarray:
    """The largest end that is within, or the piece itself: [..., k, L, ...] from [..., L, k, ends in descending order, ...].

    Args:
        axis: of the ends.
    """
    k = within.shape[axis]
    pieces = np.arange(k).reshape((k,) + (1,) * (within.ndim - axis - 1))
    # argmax counts from the far end; no hit at all gives 0 as well.
    return np.swapaxes(np.where(within.any(axis=axis), k - within.argmax(axis=axis), pieces), axis - 2, axis - 1).astype(np.int32)
