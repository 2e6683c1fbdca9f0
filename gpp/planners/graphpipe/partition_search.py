"""GraphPipe's dynamic program: the fewest devices for each depth under a bottleneck, for many bottlenecks at once.

A *lane* is a micro-batch size with a limit on the time of every stage. For the pieces of a chain from the
i-th on, `devices[i][lane, h]` is the smallest number of devices on which they and all that follows can
be laid out so that no stage exceeds the limit and at most h stages lie on any way to the end. The
number of a stage's micro-batches in flight is its depth, so memory is a condition on h, and a layout with fewer devices
at the same depth is never worse upstream: the rows are the Pareto sets of (in flight, devices), and an
optimal layout is made of optimal ones (GraphPipe, section 5).

Under a limit the longest stage that fits is the best one with its number of replicas: what is left is
shorter and never needs more devices. So a chain takes one look-up for each piece and number of replicas.
A block of branches takes the sum over its branches, at the maximum of their depths; branches of equal signature are
solved once, and branches that fit on a part of a device are packed together, first fit decreasing.

Limits on lanes replace the paper's bisection: all of them run in the same few array operations.
Complexity: O(P R) array operations of size L x H, for P pieces, R numbers of replicas, L lanes, H depths.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gpp.graph.op_graph import bits
from gpp.planners.common.candidates import Part
from gpp.planners.graphpipe.sp_structure import ParallelBlock, SeriesChain, SPStructure
from gpp.planners.graphpipe.stage_tables import Lanes, StageTables

NONE = 15_000
"""Devices of what cannot be laid out; tables are of 16-bit integers, which the sum of two must not leave."""

MAX_LANES = 1000
"""Lanes that a block may take its branches apart with; each depth of what follows it takes one."""

MAX_CELLS = 125_000
"""Lanes times operators of large graphs that a block may take, if that is less: each lane has a table for every operator."""

LARGE = 500
"""Operators from which on that counts: plans of so many stages hardly gain from the depths that are left out."""


class PartitionSearch:
    """The dynamic program over one structure.

    Args:
        depth_scale: how deep a stage really is for each unit of its depth here, for the memory check (a chain that will run as
            a graph is shallower than it looks); what comes out is judged later.
    """

    def __init__(self, structure: SPStructure, *, depth_scale: float = 1.0) -> None:
        self.structure, self.costs = structure, structure.costs
        self.num_devices = self.costs.cluster.num_devices
        self.max_depth = min(self.num_devices, structure.depth, 128)
        num_ops = self.costs.graph.num_ops
        self.max_lanes = MAX_LANES if num_ops < LARGE else MAX_CELLS // num_ops
        self.tables = StageTables(structure, self.max_depth, depth_scale)

    def solve(self, lanes: Lanes) -> Solved:
        """All layouts of the whole graph; `Solved.devices[0]` has shape [L, H + 1]."""
        self.tables.begin(lanes)
        after = np.zeros((len(lanes), self.max_depth + 1), np.int16)
        return self.chain(self.structure.root, np.arange(len(lanes)), after)

    def chain(self, chain: SeriesChain, lanes: np.ndarray, after: np.ndarray) -> Solved:
        """Solve a chain whose sequel needs `after[i, h]` devices at depth h; row i is for lane `lanes[i]`."""
        replicas = sorted({r for b in set(self.tables.lanes.sizes.tolist()) for r in self.costs.replicas[b]})
        # One lane: a limit of 5 seconds, and pieces that take 6, 4, 2 and 8 seconds on one device, half of that on two.
        #
        #     i   ends[r=1][i]   ends[r=2][i]        devices[i]   h = 0   1   2   3
        #
        #     0   0 (none)       2                                    -   -   4   4    2 + devices[2][h - 1]
        #     1   2              3                                    -   -   3   3    1 + devices[2][h - 1]
        #     2   3              4                                    -   2   2   2    2 + devices[4][h - 1]
        #     3   3 (none)       4                                    -   2   2   2    2 + devices[4][h - 1]
        #     4                                      = after[h]       0   0   0   0
        #
        # Rows are filled from the last to the first. Read from the first: pieces 0 and 1 on two devices, 2 and 3 on two.
        k, rows = len(chain.bounds) - 1, np.arange(len(lanes))
        ends: list[np.ndarray] = []
        whole = np.zeros(len(lanes), bool)
        for r in replicas:
            ends.append(self.tables.ends(chain, lanes, r))
            # Where the rest fits into one stage from every piece on, more replicas cost devices and gain nothing.
            whole |= (ends[-1] == k).reshape(k, len(lanes), -1).all(axis=(0, 2))
            if whole.all():
                break
        replicas = replicas[: len(ends)]
        devices = np.full((k + 1, *after.shape), NONE, np.int16)
        devices[k] = after
        choice = np.zeros((k, *after.shape), np.int8)
        opened: dict[int, Opened] = {}
        for i in range(k - 1, -1, -1):
            best, chosen = devices[i], choice[i]
            for n, (r, far) in enumerate(zip(replicas, ends, strict=True)):
                end = far[i]
                if end.ndim == 1:
                    # A stage that is no longer for its replicas is no better.
                    before = ends[n - 1][i] if n else i
                    at = ((end != i) & (end != before)).nonzero()[0] if np.ndim(before) < 2 else rows
                    if not at.size:
                        continue
                    found = devices[end[at], at, :-1] + r
                    if not n:
                        best[at, 1:] = np.minimum(found, NONE)
                        continue
                else:
                    at, found = rows, np.take_along_axis(devices[:, :, :-1], end[None], axis=0)[0] + r
                better = found < best[at, 1:]
                best[at, 1:] = np.where(better, found, best[at, 1:])
                chosen[at, 1:] = np.where(better, n, chosen[at, 1:])
            if i in chain.blocks:
                # A block that fits on one device as a whole needs no more of them; there is nothing to gain from its branches.
                alone = ends[0][i] == i
                large = np.flatnonzero(alone if alone.ndim == 1 else alone.any(axis=1))
                if len(large):
                    opened[i] = Opened.of(self, chain.blocks[i], lanes[large], devices[i + 1][large], large, len(lanes))
                    found, better = opened[i].devices, opened[i].devices < best[large]
                    best[large] = np.where(better, found, best[large])
                    chosen[large] = np.where(better, len(replicas), chosen[large])
            if i in chain.blocks or any(far.ndim > 2 for far in ends):
                # Deeper layouts of these may take more devices; others are as good as what follows.
                np.minimum.accumulate(best, axis=1, out=best)
        return Solved(self, chain, replicas, ends, devices, choice, opened)


@dataclass(slots=True)
class Solved:
    """A chain's table, and how to read a layout out of it."""

    search: PartitionSearch
    chain: SeriesChain
    replicas: list[int]
    ends: list[np.ndarray]
    devices: np.ndarray
    choice: np.ndarray
    opened: dict[int, Opened]

    def parts(self, lane: int, h: int) -> tuple[list[Part], int]:
        """Stages of the layout at most h deep, and the depth at which what follows the chain begins."""
        out: list[Part] = []
        i, k, bounds = 0, len(self.chain.bounds) - 1, self.chain.bounds
        while i < k:
            row = self.devices[i, lane]
            h = int(np.searchsorted(-row, -row[h]))  # the shallowest that is as good
            n = int(self.choice[i, lane, h])
            if n == len(self.replicas):
                inner, h = self.opened[i].parts(lane, h)
                out += inner
                i += 1
                continue
            end = self.ends[n][i, lane]
            j = int(end if end.ndim == 0 else end[h - 1])
            out.append((self.search.structure.intervals.mask(bounds[i], bounds[j]), self.replicas[n]))
            i, h = j, h - 1
        return out, h


@dataclass(slots=True)
class Opened:
    """A block whose branches run side by side, for some depths of what follows it.

    Args:
        devices: [L, H + 1], what follows included, for some of the chain's lanes; `row` says at which place, by lane.
        depths: [L, K], depths of what follows that are tried; `best` [L, H + 1] says which.
        inner: the branches' chains on lanes x K; `places[c, m]` is the bin of a packed branch on each of these, -1 for
            one that is laid out by itself.
    """

    search: PartitionSearch
    block: ParallelBlock
    row: np.ndarray
    devices: np.ndarray
    depths: np.ndarray
    best: np.ndarray
    inner: list[Solved]
    places: dict[tuple[int, int], np.ndarray]

    @classmethod
    def of(
        cls,
        search: PartitionSearch,
        block: ParallelBlock,
        lanes: np.ndarray,
        after: np.ndarray,
        places: np.ndarray,
        num_places: int,
    ) -> Opened:
        """Open a block for the lanes of numbers `lanes`, which stand at `places` of the chain's `num_places`."""
        depths = _depths(after, len(lanes), search.max_lanes)
        num = depths.shape[1]
        spread, begin = np.repeat(lanes, num), depths.reshape(-1)
        start = np.where(np.arange(after.shape[1]) >= begin[:, None], 0, NONE).astype(np.int16)
        inner = [search.chain(chain, spread, start) for chain in block.chains]
        packed = _Packing(search, block, search.tables.lanes.pick(spread), begin)
        total = np.take_along_axis(after, depths, axis=1).reshape(-1, 1).astype(np.int32) + start + packed.num_bins[:, None]
        for c, solved in enumerate(inner):
            alone = np.where(packed.small[c] > 0, 0, len(block.members[c])).astype(np.int32)
            total += solved.devices[0] * alone[:, None]
        # A packed branch is a stage of its own depth.
        total[np.arange(after.shape[1]) <= begin[:, None]] = NONE
        total = np.minimum(total, NONE).reshape(len(lanes), num, -1)
        best = total.argmin(axis=1)
        devices = np.take_along_axis(total, best[:, None], axis=1)[:, 0].astype(np.int16)
        row = np.full(num_places, -1)
        row[places] = np.arange(len(places))
        return cls(search, block, row, devices, depths, best, inner, packed.places)

    def parts(self, lane: int, h: int) -> tuple[list[Part], int]:
        """Stages of the branches, and the depth of what follows."""
        lane = int(self.row[lane])
        k = int(self.best[lane, h])
        at, out = lane * self.depths.shape[1] + k, []
        bins: dict[int, int] = {}
        for c, members in enumerate(self.block.members):
            alone: list[Part] | None = None
            for m, branch in enumerate(members):
                place = int(self.places[c, m][at])
                if place >= 0:
                    bins[place] = bins.get(place, 0) | branch
                    continue
                if alone is None:
                    alone, _ = self.inner[c].parts(at, h)
                out += [(_translate(mask, members[0], branch), r) for mask, r in alone]
        out += [(mask, 1) for mask in bins.values()]
        return out, int(self.depths[lane, k])


def _depths(after: np.ndarray, num_lanes: int, max_lanes: int) -> np.ndarray:
    """Depths of what follows that are worth a try: the smallest possible, the one with fewest devices, one between."""
    first = (after < NONE).argmax(axis=1)
    least = after.min(axis=1)
    last = (after == least[:, None]).argmax(axis=1)
    if num_lanes > max_lanes or (first == last).all():
        return last[:, None]
    middle = (after <= ((after[np.arange(num_lanes), first].astype(np.int32) + least) // 2)[:, None]).argmax(axis=1)
    return np.stack([first, last] if (middle == last).all() or 3 * num_lanes > max_lanes else [first, middle, last], axis=1)


class _Packing:
    """Branches that fit on one device, several to a device: first fit by descending time.

    Args:
        begin: [L], depth of what follows.
    """

    def __init__(self, search: PartitionSearch, block: ParallelBlock, lanes: Lanes, begin: np.ndarray) -> None:
        costs, most = search.costs, search.costs.problem.minibatch_size // lanes.sizes
        in_flight = costs.problem.regime.held(begin + 1, most)
        limits, room = lanes.limits_s, costs.limit_bytes
        seconds, memory = [], []
        for chain, members in zip(block.chains, block.members, strict=True):
            by_size = {b: search.tables.stage_s(chain, b, 1)[0, -1] for b in set(lanes.sizes.tolist())}
            seconds.append(np.array([by_size[b] for b in lanes.sizes.tolist()]))
            held = costs.problem.amounts(members[0]).held(lanes.sizes, costs.problem.regime.assumed_copies)
            memory.append(held.peak(in_flight))
        self.small = [((s <= limits) & (m <= room)).astype(np.int32) for s, m in zip(seconds, memory, strict=True)]
        branches = [(c, m) for c, members in enumerate(block.members) for m in range(len(members))]
        branches.sort(key=lambda branch: (-float(np.mean(np.minimum(seconds[branch[0]], 1e30))), branch))
        load, used = np.zeros((len(lanes), len(branches))), np.zeros((len(lanes), len(branches)))
        rows = np.arange(len(lanes))
        self.places: dict[tuple[int, int], np.ndarray] = {}
        for c, m in branches:
            fits = (load + seconds[c][:, None] <= limits[:, None]) & (used + memory[c][:, None] <= room)
            place = np.where(self.small[c] > 0, fits.argmax(axis=1), -1)
            inside = self.small[c] > 0
            load[rows[inside], place[inside]] += seconds[c][inside]
            used[rows[inside], place[inside]] += memory[c][inside]
            self.places[c, m] = place
        self.num_bins = (np.stack(list(self.places.values())).max(axis=0) + 1).astype(np.int32)


def _translate(mask: int, source: int, target: int) -> int:
    """Carry a set over to an isomorphic branch, operator by operator in ascending order."""
    if source == target:
        return mask
    places = dict(zip(bits(source), bits(target), strict=True))
    return sum(1 << places[op] for op in bits(mask))
