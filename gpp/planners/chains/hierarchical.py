"""PipeDream's recursion over nodes: every stretch of the model on the devices of one node, then stretches on whole nodes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gpp.cluster import Cluster
from gpp.cost.stage import FinishLines
from gpp.planners.chains.bottleneck import Room, Way, best_chain
from gpp.planners.chains.chain_tables import AbstractChainSearch, Part


def even_servers(cluster: Cluster) -> list[tuple[int, ...]] | None:
    """The devices of each node, if there are several equal ones with slower or faster links between them; else None."""
    nodes = sorted(set(cluster.nodes))
    found = [tuple(d for d, n in enumerate(cluster.nodes) if n == node) for node in nodes]
    inside, across = cluster.wiring.means
    alike = inside == across or len({len(devices) for devices in found}) > 1
    return None if len(nodes) == 1 or alike or len(found[0]) == 1 else found


class _Inside(NamedTuple):
    """Of one node: seconds of stretches [m][start, end] on at most m devices, of one stage and of the last of several."""

    whole: dict[int, np.ndarray]
    tail: dict[int, np.ndarray]
    best: list[np.ndarray]


class Servers:
    """The search over nodes."""

    def __init__(self, search: AbstractChainSearch, servers: list[tuple[int, ...]]) -> None:
        problem = search.problem
        self.search, self.problem, self.tables, self.family, self.servers = search, problem, search.tables, search.family, servers
        self.seconds, self.budget, self.limit = search.seconds, search.budget, search.limit
        self.per_node, (self.inner, self.outer) = len(servers[0]), problem.cluster.wiring.means
        self.budget.hold(8.0 * self.family.num_states**2 * 4 * self.per_node, "its tables")
        self.amounts, self.copies = self.tables.of(np.arange(self.family.num_pairs)).amounts, problem.regime.assumed_copies

    def find(self, b: int) -> tuple[float, list[Part]] | None:
        """Own objective and stages of the best chain for one micro-batch size; None if nothing fits.

        A stage's distance to the end is not known inside the recursion, so all stages are held to one depth; it is raised until
        the chain found is no longer than that.
        """
        count = self.problem.minibatch_size // b
        depth = 1
        while True:
            found = self._at(b, depth)
            if found is None:
                return None
            length = min(len(found[1]), count)
            if length <= depth or self._fits(found[1], b, count):
                return found
            depth = min(length, max(depth + 1, 2 * depth))

    def _fits(self, parts: list[Part], b: int, count: int) -> bool:
        for position, part in enumerate(reversed(parts), 1):
            memory = self.problem.amounts(part.mask).held(b // part.replicas, self.copies)
            if memory.peak(self.problem.regime.held(position, count)) > self.limit:
                return False
        return True

    def _at(self, b: int, depth: int) -> tuple[float, list[Part]] | None:
        family, tables, last = self.family, self.tables, self.family.num_states - 1
        nodes = [m for m in self.search.counts(b) if m <= len(self.servers)]
        count = self.problem.accumulation(b)
        held = self.problem.regime.held(depth, self.problem.minibatch_size // b)
        inside = {m: self._inside(b // m, m, count, held) for m in nodes}
        # Least device seconds of a stretch: nothing runs it faster than without boundaries or reductions.
        samples = sorted({b // m // r for m in nodes for r in inside[m].whole})
        least = np.min([b // s * np.sum(self.seconds.of(s), axis=0) for s in samples], axis=0)
        work = family.sums(least) / self.per_node

        def ways(room: Room) -> list[Way]:
            out = []
            for m in nodes:
                pairs = room.pairs(m)
                start, end = family.start[pairs], family.end[pairs]
                wire = b // m / self.outer.bandwidth_bytes_per_s
                time_s = np.maximum(inside[m].best[-1][start, end], np.where(start != last, tables.live[start], 0.0) * wire)
                time_s = np.maximum(time_s, tables.live[end] * wire)
                keep = np.flatnonzero(time_s <= room.cap_s)
                out.append(Way(m, m, 0, pairs[keep], time_s[None, keep]))
            return out

        chain = best_chain(family, work, ways, len(self.servers), self.budget)
        if chain is None:
            return None
        parts, node = [], 0
        for cut in chain.cuts:
            m = cut.way.devices
            start, end = int(family.start[cut.pair]), int(family.end[cut.pair])
            used = 0
            for mask, r in self._stretch(inside[m], start, end):
                devices = tuple(d for server in self.servers[node : node + m] for d in server[used : used + r])
                parts.append(Part(mask, r * m, devices=devices))
                used += r
            node += m
        return chain.value_s, parts

    def _inside(self, b: int, nodes: int, count: int, in_flight: int) -> _Inside:
        """All stretches on each of `nodes` nodes, for `b` samples on a node and `count` micro-batches between two updates.

        A stage with r replicas on every node sums its gradients over all of them.
        """
        family, tables = self.family, self.tables
        n, last = family.num_states, family.num_states - 1
        whole, tail = {}, {}
        for r in (r for r in self.search.counts(b) if r <= self.per_node):
            samples = b // r
            sums = family.sums(np.sum(self.seconds.of(samples), axis=0))
            time_s = sums[family.start] - sums[family.end]
            devices = tuple(d for server in self.servers[:nodes] for d in server[:r])
            time_s = time_s + FinishLines.of(self.problem, devices).seconds(self.amounts.trainable) / count
            need = self.amounts.held(samples, self.copies).peak(in_flight)
            dense = np.full((n, n), np.inf)
            dense[family.start, family.end] = np.where(need <= self.limit, time_s, np.inf)
            wire = samples / self.inner.bandwidth_bytes_per_s
            whole[r] = dense
            tail[r] = np.maximum(dense, np.maximum(tables.live[:, None], tables.live[None, :]) * wire)
        nothing = np.full((n, n), np.inf)
        best: list[np.ndarray] = []
        for m in range(1, self.per_node + 1):
            self.budget.check()
            value = np.minimum(best[-1], whole.get(m, nothing)) if best else whole[1].copy()
            for r in (r for r in tail if r < m):
                before, behind = best[m - r - 1], tail[r]
                for j in range(1, last):
                    # States are ordered by size: a stretch through cut j begins behind it in the list and ends before it.
                    np.minimum(
                        value[j + 1 :, :j], np.maximum(before[j + 1 :, j, None], behind[None, j, :j]), out=value[j + 1 :, :j]
                    )
            best.append(value)
        return _Inside(whole, tail, best)

    def _stretch(self, inside: _Inside, start: int, end: int) -> list[tuple[int, int]]:
        """(operators, replicas) of a stretch's stages on one node; ties: fewest devices, one stage before several."""
        masks, out = self.family.masks, []
        value = inside.best[-1][start, end]
        m = next(m for m, table in enumerate(inside.best, 1) if table[start, end] <= value)
        while True:
            value = inside.best[m - 1][start, end]
            one = next((r for r in inside.whole if r <= m and inside.whole[r][start, end] <= value), None)
            if one is not None:
                out.append((masks[start] & ~masks[end], one))
                return out[::-1]
            r, j = next(
                (r, int(j))
                for r in inside.tail
                if r < m
                for j in np.flatnonzero(np.maximum(inside.best[m - r - 1][start], inside.tail[r][:, end]) <= value)
                if end < j < start
            )
            out.append((masks[j] & ~masks[end], r))
            m, end = m - r, j
