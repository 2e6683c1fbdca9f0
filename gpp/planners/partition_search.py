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
from operator import le, sub
from typing import NamedTuple

from gpp.graph.op_graph import OpGraph, bits
from gpp.graph.series_parallel import Order, signature
from gpp.planners.stage_costs import StageCosts

MAX_COUNTS = 128
"""Branch counts by class up to which every way of grouping branches is tried."""

IMPOSSIBLE = 1 << 30
"""Devices of what does not fit at any number."""


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

Counts = tuple[int, ...]
"""Branches of each class."""

Groups = tuple[tuple[Counts, int], ...]
"""Groups of branches that may be one stage, each with its devices."""


class Split(NamedTuple):
    """A first piece and the rest. `whole`: the piece is one stage; otherwise it is laid out in its turn."""

    first: int
    rest: int
    whole: bool


class Classes(NamedTuple):
    """Branches by signature.

    Args:
        members: masks of each class, ascending.
        counts: members of each class.
        groups: ways to choose two branches or more, each with the first branches of each class as a mask.
    """

    members: tuple[tuple[int, ...], ...]
    counts: Counts
    groups: tuple[tuple[Counts, int], ...]

    @classmethod
    def of(cls, members: tuple[tuple[int, ...], ...]) -> Classes:
        counts = tuple(len(m) for m in members)
        return cls(
            members,
            counts,
            tuple((group, sum(sum(m[:g]) for m, g in zip(members, group, strict=True))) for group in _compositions(counts)),
        )


class Structure:
    """How a graph comes apart, whatever the memory and the limits: shared by searches of one graph.

    Args:
        labels: what tells operators apart besides their amounts: their times.
    """

    def __init__(self, graph: OpGraph, order: Order, labels: list[tuple[float, ...]]) -> None:
        self.graph, self.order, self._labels = graph, order, labels
        self._signatures: dict[int, object] = {}
        self._classes: dict[int, Classes] = {}
        self._splits: dict[int, tuple[Split, ...]] = {}

    def classes_of(self, mask: int) -> Classes:
        found = self._classes.get(mask)
        if found is None:
            by_signature: dict[object, list[int]] = {}
            for branch in self.order.components(mask):
                if branch not in self._signatures:
                    self._signatures[branch] = signature(self.graph, branch, self._labels)
                by_signature.setdefault(self._signatures[branch], []).append(branch)
            found = self._classes[mask] = Classes.of(tuple(tuple(members) for members in by_signature.values()))
        return found

    def splits_of(self, mask: int) -> tuple[Split, ...]:
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
        classes = self.classes_of(item)
        if sum(classes.counts) < 2:
            return
        for members in classes.members:
            pieces = self.order.series_items(members[0])
            end = 0
            for piece in reversed(pieces) if last else pieces:
                end |= piece
                yield end
        yield from (mask for _, mask in classes.groups if mask != item)


class PartitionSearch:
    """The dynamic program of one problem; `solve` runs it for one micro-batch size and bottleneck."""

    def __init__(self, structure: Structure, costs: StageCosts) -> None:
        self.structure, self.costs, self.num_devices = structure, costs, costs.cluster.num_devices
        self._fronts: dict[tuple[int, int], Front] = {}
        self._packed: dict[tuple[Counts, Groups, Counts], tuple[int, list[Counts]]] = {}
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
        # The stages that follow take a device each, at least.
        budget = self.num_devices - following
        if self._fewest_devices(mask) > budget:
            return ()
        best: dict[int, Entry] = {}
        stage = self._stage(mask, following + 1)
        if stage:
            best[following + 1] = stage
        for first, rest, whole in self.structure.splits_of(mask):
            if whole and not self._stage(first, following + 2):
                continue
            least = self._fewest_devices(first)
            for after in self.front(rest, following):
                if after.num_devices + least > budget:
                    continue
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
        for entry in self._side_by_side(mask, following) if len(self.structure.order.components(mask)) > 1 else ():
            old = best.get(entry.depth)
            if old is None or (entry.num_devices, entry.bottleneck_s) < (old.num_devices, old.bottleneck_s):
                best[entry.depth] = entry
        out, fewest = [], budget + 1
        for depth in sorted(best):
            if best[depth].num_devices < fewest:
                out.append(best[depth])
                fewest = best[depth].num_devices
        return tuple(out)

    def _fewest_devices(self, mask: int) -> float:
        """Devices without which a set cannot meet the limit, if all of them were always busy."""
        return self.costs.least_work_s(mask, self._b) / self._limit_s * (1 - 1e-9)

    def _stage(self, mask: int, depth: int) -> Entry | None:
        """A set as one stage, with the fewest replicas that meet the limit and fit at this depth."""
        for option in self.costs.options(mask, self._b):
            if option.time_s <= self._limit_s and depth <= option.max_depth:
                return Entry(depth, option.num_replicas, option.time_s, ("stage", mask, option.num_replicas))
        return None

    def _side_by_side(self, mask: int, following: int) -> Iterator[Entry]:
        """Branches dealt to groups: a group of one is laid out in its turn, a larger one is a stage."""
        classes = self.structure.classes_of(mask)
        fronts = [self.front(members[0], following) for members in classes.members]
        groups, stages = self._groups(classes, following + 1)
        fewest = self.num_devices + 1
        for depth in sorted({entry.depth for front in fronts for entry in front} | {following + 1}):
            singles = [next((e for e in reversed(front) if e.depth <= depth), None) for front in fronts]
            key = (classes.counts, groups, tuple(e.num_devices if e else IMPOSSIBLE for e in singles))
            if key not in self._packed:
                self._packed[key] = _pack(*key)
            count, chosen = self._packed[key]
            if count < fewest:
                fewest = count
                entries = [stages.get(group) or singles[next(c for c, g in enumerate(group) if g)] for group in chosen]
                yield Entry(
                    depth,
                    count,
                    max(e.bottleneck_s for e in entries if e),
                    ("parallel", classes.members, tuple((g, e.layout) for g, e in zip(chosen, entries, strict=True) if e)),
                )

    def _groups(self, classes: Classes, depth: int) -> tuple[Groups, dict[Counts, Entry]]:
        """Groups of at least two branches that are feasible as one stage: their devices, and the stages."""
        stages = {}
        for group, mask in classes.groups:
            stage = self._stage(mask, depth)
            if stage:
                stages[group] = stage
        return tuple((group, stage.num_devices) for group, stage in stages.items()), stages

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
                mine.append(members[c][taken[c] : taken[c] + g])
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


def _pack(counts: Counts, groups: Groups, singles: Counts) -> tuple[int, list[Counts]]:
    """Deal all branches to groups with the fewest devices.

    Args:
        counts: branches of each class.
        groups: feasible groups of several branches, each with its devices.
        singles: devices of a single branch of each class.

    Returns:
        Devices (`IMPOSSIBLE` or more if the branches cannot be dealt) and the groups chosen.
    """
    unit = tuple(tuple(int(k == c) for k in range(len(counts))) for c in range(len(counts)))
    choices: list[list[tuple[Counts, int]]] = [[(unit[c], single)] for c, single in enumerate(singles)]
    for group, devices in groups:
        # A group that takes as many devices as its branches one by one is of no use. The others are
        # listed under their first class: branches are dealt in the order of their classes.
        if devices < sum(g * single for g, single in zip(group, singles, strict=True)):
            choices[next(c for c, g in enumerate(group) if g)].append((group, devices))
    memo: dict[Counts, tuple[int, Counts | None]] = {(0,) * len(counts): (0, None)}

    def fewest(left: Counts) -> int:
        if left not in memo:
            first = next(c for c, n in enumerate(left) if n)
            best: tuple[int, Counts | None] = (IMPOSSIBLE * sum(counts), None)
            for group, devices in choices[first]:
                if all(map(le, group, left)):
                    total = devices + fewest(tuple(map(sub, left, group)))
                    if total < best[0]:
                        best = total, group
            memo[left] = best
        return memo[left][0]

    total, chosen, left = fewest(counts), [], counts
    while (group := memo[left][1]) is not None:
        chosen.append(group)
        left = tuple(map(sub, left, group))
    return total, chosen


def _translate(mask: int, source: int, target: int) -> int:
    """Carry a set over to an isomorphic branch, operator by operator in ascending order."""
    if source == target:
        return mask
    to = dict(zip(bits(source), bits(target), strict=True))
    return sum(1 << to[op] for op in bits(mask))
