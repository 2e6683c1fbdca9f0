"""The series-parallel structure as chains of pieces, and the tables of all stages that lie inside one chain.

A chain is a list of pieces that follow one another; a piece is a run of operators or a block of branches,
and a branch is a chain again. All operators stand in one linear order in which every chain and every
branch is an interval, so a stage inside a chain is a pair of positions and its amounts are looked up
in tables over that order (`intervals`). Long runs are cut at their lightest boundaries only, as many times
as the devices can use (`_thin`): what a planner does with them is refined operator by operator later.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from gpp.graph.op_graph import OpGraph
from gpp.graph.series_parallel import Order, signature
from gpp.planners.common.linear_orders import intervals
from gpp.planners.common.stage_costs import StageCosts

CUTS_PER_DEVICE = 2.0
"""Places to cut the whole graph, for each device, if a search does not ask for others."""

LEAST_CUTS, MOST_CUTS = 64, 256
"""Places to cut the whole graph, however few or many the devices; a run of operators gets its share of the time of them."""

LEAST_RUN = 6
"""Places to cut a run at least, if it has so many operators."""


@dataclass(slots=True)
class ParallelBlock:
    """Branches side by side. `members[c]` are the masks of the branches of class c; `chains[c]` is the first one taken apart."""

    members: list[list[int]]
    chains: list[SeriesChain]


@dataclass(slots=True)
class SeriesChain:
    """Pieces one after the other.

    Args:
        bounds: positions in the linear order: piece i is [bounds[i], bounds[i + 1]).
        blocks: pieces that are blocks, by index.
    """

    bounds: list[int] = field(default_factory=list)
    blocks: dict[int, ParallelBlock] = field(default_factory=dict)


class SPStructure:
    """One way to take a graph apart.

    Args:
        structure: reachability that is series-parallel; None to take `line` as one chain.
        line: a topological order of the operators, if there is no structure.
        cuts_per_device: the lightest boundaries of that line that are kept.
    """

    def __init__(
        self, costs: StageCosts, structure: Order | None, line: tuple[int, ...] = (), cuts_per_device: float = CUTS_PER_DEVICE
    ) -> None:
        self.costs, self.graph, self._per_device = costs, costs.graph, cuts_per_device
        self._labels = costs.labels()
        self.line: list[int] = []
        if structure is None:
            self.line = list(line)
            self.root = SeriesChain(bounds=list(range(len(line) + 1)))
        else:
            self.root = self._take_apart(structure, self.graph.all_mask)
        self.intervals = intervals(costs, tuple(self.line))
        self._thin(self.root)
        self.depth = _longest(self.root)

    def _take_apart(self, order: Order, mask: int) -> SeriesChain:
        chain = SeriesChain(bounds=[len(self.line)])
        parts = order.components(mask)
        for piece in order.series_items(mask) if len(parts) == 1 else (mask,):
            branches = order.components(piece)
            if len(branches) > 1:
                chain.blocks[len(chain.bounds) - 1] = self._block(order, branches)
            else:
                assert not piece & (piece - 1), "a series-parallel piece without branches is one operator"
                self.line.append(piece.bit_length() - 1)
            chain.bounds.append(len(self.line))
        return chain

    def _block(self, order: Order, branches: tuple[int, ...]) -> ParallelBlock:
        classes: dict[object, list[int]] = {}
        for branch in branches:
            classes.setdefault(signature(self.graph, branch, self._labels), []).append(branch)
        chains = []
        for members in classes.values():
            chains.append(self._take_apart(order, members[0]))
            for branch in members[1:]:
                self.line.extend(order.topological(branch))
        return ParallelBlock(list(classes.values()), chains)

    def _thin(self, chain: SeriesChain) -> None:
        """Keep the lightest boundaries of every run of operators."""
        crossing = _crossing_bytes(self.graph, self.line)
        seconds = np.array(self.costs.op_seconds())[self.line]
        total = float(seconds.sum()) or 1.0
        cuts = min(max(LEAST_CUTS, self._per_device * self.costs.cluster.num_devices), MOST_CUTS)

        def thin(chain: SeriesChain) -> None:
            bounds, blocks = [chain.bounds[0]], {}
            run: list[int] = []
            for i, end in enumerate(chain.bounds[1:]):
                if i in chain.blocks:
                    bounds += [*lightest(bounds[-1], run), *run[-1:]]
                    run = []
                    blocks[len(bounds) - 1] = chain.blocks[i]
                    bounds.append(end)
                    for branch in chain.blocks[i].chains:
                        thin(branch)
                else:
                    run.append(end)
            chain.bounds, chain.blocks = [*bounds, *lightest(bounds[-1], run), *run[-1:]], blocks

        def lightest(start: int, ends: list[int]) -> list[int]:
            """Inner boundaries of a run of single operators that ends at each of `ends`."""
            inner = ends[:-1]
            share = float(seconds[start : ends[-1]].sum()) / total if ends else 0.0
            most = max(LEAST_RUN, round(cuts * share))
            if len(inner) <= most:
                return inner
            into = np.cumsum(seconds[start : ends[-1]])
            edges = np.searchsorted(into, into[-1] * np.arange(1, most + 1) / (most + 1))
            kept, low = [], 0
            for high in [*edges[1:], len(inner)]:
                group = inner[low : max(int(high), low + 1)]
                low += len(group)
                if group:
                    kept.append(min(group, key=lambda position: (crossing[position], position)))
            return kept

        thin(chain)


def _longest(chain: SeriesChain) -> int:
    """Pieces on the longest way through a chain."""
    blocks = {i: max(_longest(branch) for branch in block.chains) for i, block in chain.blocks.items()}
    return sum(blocks.get(i, 1) for i in range(len(chain.bounds) - 1))


def _crossing_bytes(graph: OpGraph, line: list[int]) -> list[float]:
    """Bytes per sample that are alive between neighbours of the linear order, by position."""
    at = {op: i for i, op in enumerate(line)}
    change = [0.0] * (len(line) + 2)
    for tensor in graph.tensors:
        if tensor.consumers:
            change[at[tensor.producer] + 1] += tensor.bytes_per_sample
            change[max(at[c] for c in tensor.consumers) + 1] -= tensor.bytes_per_sample
    return np.cumsum(change).tolist()
