"""GraphPipe's dynamic program: the shallowest partition of each part of the graph under a bottleneck.

For one micro-batch size and one bound on the time of every stage, `front(G, h)` lists what a set of
operators G can do when h stages follow it: pairs (devices, depth at its source), where a pair with more
devices has a smaller depth. The depth of a stage is the number of its micro-batches in flight, so a
smaller depth upstream is never worse: an optimal plan is made of optimal pieces (GraphPipe, section 5).

Sets are masks; `Order` takes each apart in one way only. Branches of equal signature share their
entries, and groups of them are counted, not listed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

from gpp.graph.op_graph import bits
from gpp.graph.series_parallel import Order, signature
from gpp.planners.stage_costs import StageCosts

MAX_COUNTS = 128
"""Branch counts by class up to which every way of grouping branches is tried."""


class Entry(NamedTuple):
    """One way to lay out a set of operators.

    Args:
        depth: stages on the longest path from its source to the end of the pipeline.
        num_devices: devices that it takes.
        bottleneck_s: time of its slowest stage.
        layout: a tree of stages; see `PartitionSearch.parts`.
    """

    depth: int
    num_devices: int
    bottleneck_s: float
    layout: tuple


Front = tuple[Entry, ...]


class Split(NamedTuple):
    """A first piece and the rest. `whole`: the piece is one stage; otherwise it is laid out in its turn."""

    first: int
    rest: int
    whole: bool


class Classes(NamedTuple):
    """Branches by signature: masks of each class, ascending."""

    members: tuple[tuple[int, ...], ...]

    @property
    def counts(self) -> tuple[int, ...]:
        return tuple(len(m) for m in self.members)


class PartitionSearch:
    """The dynamic program of one problem; `solve` runs it for one micro-batch size and bottleneck."""

    def __init__(self, order: Order, costs: StageCosts) -> None:
        self.order, self.costs, self.num_devices = order, costs, costs.cluster.num_devices
        self._labels = costs.labels()
        self._signatures: dict[int, object] = {}
        self._classes: dict[int, Classes] = {}
        self._splits: dict[int, tuple[Split, ...]] = {}
        self._fronts: dict[tuple[int, int], Front] = {}
        self._b, self._limit_s = 1, math.inf

    def solve(self, microbatch_size: int, limit_s: float) -> Front:
        """All trade-offs of devices and depth for the whole graph, no stage slower than `limit_s`; empty if none fits."""
        self._b, self._limit_s = microbatch_size, limit_s
        self._fronts.clear()
        return self.front(self.costs.graph.all_mask, 0)

    def front(self, mask: int, following: int) -> Front:
        """Layouts of a set when `following` stages come after it, by ascending depth and descending devices."""
        key = (mask, following)
        found = self._fronts.get(key)
        if found is None:
            found = self._fronts[key] = self._front(mask, following)
        return found

    def _front(self, mask: int, following: int) -> Front:
        best: dict[int, Entry] = {}
        budget = self.num_devices
        stage = self._stage(mask, following + 1)
        if stage:
            best[following + 1] = stage
        for first, rest, whole in self._splits_of(mask):
            if whole and not self._stage(first, following + 2):
                continue
            for after in self.front(rest, following):
                if whole:
                    one = self._stage(first, after.depth + 1)
                    pieces = (one,) if one else ()
                else:
                    pieces = self.front(first, after.depth)
                for piece in pieces:
                    count = piece.num_devices + after.num_devices
                    slowest = max(piece.bottleneck_s, after.bottleneck_s)
                    old = best.get(piece.depth)
                    if count <= budget and (old is None or (count, slowest) < (old.num_devices, old.bottleneck_s)):
                        best[piece.depth] = Entry(piece.depth, count, slowest, ("series", piece.layout, after.layout))
        for entry in self._side_by_side(mask, following):
            old = best.get(entry.depth)
            if old is None or (entry.num_devices, entry.bottleneck_s) < (old.num_devices, old.bottleneck_s):
                best[entry.depth] = entry
        out, fewest = [], budget + 1
        for depth in sorted(best):
            if best[depth].num_devices < fewest:
                out.append(best[depth])
                fewest = best[depth].num_devices
        return tuple(out)

    def _stage(self, mask: int, depth: int) -> Entry | None:
        """A set as one stage, with the fewest replicas that meet the limit and fit at this depth."""
        for option in self.costs.options(mask, self._b):
            if option.time_s <= self._limit_s and depth <= option.max_depth:
                return Entry(depth, option.num_replicas, option.time_s, ("stage", mask, option.num_replicas))
        return None

    def _side_by_side(self, mask: int, following: int) -> Iterator[Entry]:
        """Branches dealt to groups: a group of one is laid out in its turn, a larger one is a stage."""
        classes = self._classes_of(mask)
        if sum(classes.counts) < 2:
            return
        fronts = [self.front(members[0], following) for members in classes.members]
        groups = self._groups(classes, following + 1)
        fewest = self.num_devices + 1
        for depth in sorted({entry.depth for front in fronts for entry in front} | {following + 1}):
            singles = [next((e for e in reversed(front) if e.depth <= depth), None) for front in fronts]
            packed = _pack(classes.counts, groups, singles, fewest - 1)
            if packed is not None:
                fewest, chosen = packed
                entries = [entry for _, entry in chosen]
                yield Entry(depth, fewest, max(e.bottleneck_s for e in entries),
                            ("parallel", classes.members, tuple((g, e.layout) for g, e in chosen)))
                if fewest == 1:
                    return

    def _groups(self, classes: Classes, depth: int) -> list[tuple[tuple[int, ...], Entry]]:
        """Groups of at least two branches, by count of each class, that are feasible as one stage."""
        counts = classes.counts
        out = []
        for group in _compositions(counts):
            mask = 0
            for members, g in zip(classes.members, group, strict=True):
                for member in members[:g]:
                    mask |= member
            stage = self._stage(mask, depth)
            if stage:
                out.append((group, stage))
        return out

    def _classes_of(self, mask: int) -> Classes:
        found = self._classes.get(mask)
        if found is None:
            by_signature: dict[object, list[int]] = {}
            for branch in self.order.components(mask):
                if branch not in self._signatures:
                    self._signatures[branch] = signature(self.costs.graph, branch, self._labels)
                by_signature.setdefault(self._signatures[branch], []).append(branch)
            found = self._classes[mask] = Classes(tuple(tuple(members) for members in by_signature.values()))
        return found

    def _splits_of(self, mask: int) -> tuple[Split, ...]:
        """Series splits, and those that absorb a join or a fork (dossier 7.3), each by its first piece.

        ABSORB-JOIN: the tail of one branch, or several whole branches, go with what follows the join.
        ABSORB-FORK: the head of one branch, or several whole branches, go with what precedes the fork.
        """
        found = self._splits.get(mask)
        if found is not None:
            return found
        items = self.order.series_items(mask)
        out: list[Split] = []
        before = 0
        for p, item in enumerate(items):
            after = mask & ~before & ~item
            if after:
                out.append(Split(before | item, after, whole=p > 0))
                for tail in self._ends(item, last=True):
                    out.append(Split(before | (item & ~tail), after | tail, whole=p > 0))
            if before:
                for head in self._ends(item, last=False):
                    out.append(Split(before | head, after | (item & ~head), whole=True))
            before |= item
        # A first piece of one operator can only be a stage. Short rests first, so that long chains do not recurse deeply.
        unique = sorted(dict.fromkeys(out), key=lambda split: split.rest.bit_count())
        found = self._splits[mask] = tuple(Split(f, r, whole or not f & (f - 1)) for f, r, whole in unique)
        return found

    def _ends(self, item: int, last: bool) -> Iterator[int]:
        """What a join (`last`) or a fork may absorb from a parallel item: see `_splits_of`."""
        classes = self._classes_of(item)
        if sum(classes.counts) < 2:
            return
        for members in classes.members:
            pieces = self.order.series_items(members[0])
            end = 0
            for piece in reversed(pieces) if last else pieces:
                end |= piece
                yield end
        for group in _compositions(classes.counts):
            if sum(group) < sum(classes.counts):
                mask = 0
                for members, g in zip(classes.members, group, strict=True):
                    for member in members[:g]:
                        mask |= member
                yield mask

    def parts(self, layout: tuple) -> list[tuple[int, int]]:
        """(operator mask, devices) of every stage of a layout."""
        kind = layout[0]
        if kind == "stage":
            return [(layout[1], layout[2])]
        if kind == "series":
            return self.parts(layout[1]) + self.parts(layout[2])
        _, members, chosen = layout
        taken, out = [0] * len(members), []
        for group, inner in chosen:
            mine = []
            for c, g in enumerate(group):
                mine.append(members[c][taken[c]:taken[c] + g])
                taken[c] += g
            branches = [branch for branches in mine for branch in branches]
            if len(branches) == 1:
                c = next(c for c, g in enumerate(group) if g)
                out += [(_translate(mask, members[c][0], branches[0]), r) for mask, r in self.parts(inner)]
            else:
                out.append((sum(branches), inner[2]))
        return out


def _compositions(counts: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Groups of two branches or more; with many classes only runs of neighbouring ones, each taken whole but the ends."""
    if math.prod(c + 1 for c in counts) <= MAX_COUNTS:
        yield from (g for g in itertools.product(*(range(c + 1) for c in counts)) if sum(g) > 1)
        return
    for i in range(len(counts)):
        for j in range(i, len(counts)):
            group = tuple(c if i <= k <= j else 0 for k, c in enumerate(counts))
            if sum(group) > 1:
                yield group
        for g in range(2, counts[i]):
            yield tuple(g if k == i else 0 for k in range(len(counts)))


def _pack(counts: tuple[int, ...], groups: list[tuple[tuple[int, ...], Entry]], singles: list[Entry | None],
          most: int) -> tuple[int, list[tuple[tuple[int, ...], Entry]]] | None:
    """Deal all branches to groups with the fewest devices, at most `most`; None if that is impossible.

    Args:
        counts: branches of each class.
        groups: feasible groups of several branches, each with its stage.
        singles: layout of a single branch of each class.
    """
    choices: list[list[tuple[tuple[int, ...], Entry]]] = [[] for _ in counts]
    for c, entry in enumerate(singles):
        if entry is not None:
            choices[c].append((tuple(int(k == c) for k in range(len(counts))), entry))
    for group, entry in groups:
        # A group is listed under its first class: branches are dealt in the order of their classes.
        choices[next(c for c, g in enumerate(group) if g)].append((group, entry))
    memo: dict[tuple[int, ...], tuple[int, float, tuple | None]] = {(0,) * len(counts): (0, 0.0, None)}

    def fewest(left: tuple[int, ...]) -> tuple[int, float, tuple | None]:
        found = memo.get(left)
        if found is None:
            first = next(c for c, n in enumerate(left) if n)
            found = (1 << 30, math.inf, None)
            for group, entry in choices[first]:
                rest = tuple(n - g for n, g in zip(left, group, strict=True))
                if min(rest) >= 0:
                    count, slowest, _ = fewest(rest)
                    value = (count + entry.num_devices, max(slowest, entry.bottleneck_s))
                    if value < found[:2]:
                        found = (*value, (group, entry, rest))
            memo[left] = found
        return found

    total, _, choice = fewest(counts)
    if total > most:
        return None
    chosen = []
    while choice is not None:
        group, entry, rest = choice
        chosen.append((group, entry))
        choice = fewest(rest)[2]
    return total, chosen


def _translate(mask: int, source: int, target: int) -> int:
    """Carry a set over to an isomorphic branch, operator by operator in ascending order."""
    if source == target:
        return mask
    to = dict(zip(bits(source), bits(target), strict=True))
    return sum(1 << to[op] for op in bits(mask))


