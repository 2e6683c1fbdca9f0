"""Which devices a stage gets: inside one node first, near its neighbours; on unequal devices each stage the least that will do.

Objective: no all-reduce and few bytes between nodes; on unequal devices, first the shortest time of the slowest stage.

A stage's replicas exchange its whole gradients at the end of every mini-batch, so they go into one node wherever they fit. On
equal devices the numbers of replicas decide alone (`Placer.equal`): stages of whole nodes first, then the others in stage
order, each into its predecessor's node if there is room, else into the fullest with room.

On unequal ones (`Placer.deal`) the types of devices are dealt out first, under a limit on every stage's time that is the
smallest of those that stages have on some type: the stages with the smallest choice of fast enough, large enough devices come
first, and each takes the slowest and smallest of its choice, replicas of one type if it has as many. Devices of a type are
then chosen by node; where devices and pairs have links of their own, one by one, by what the messages of a micro-batch would
take to the stages that are placed already and to those that are not.

Complexity: O(S N + D) for S stages and N nodes; with K types O(S K (log S K + N)), and with links by pair O(D^2) messages.
Greedy, so the limit need not be the least that some placement has: `gpp.planners.common.rebalance` improves the placements of
the plans that are worth it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property

from gpp.cluster import Cluster
from gpp.planners.search.nodes import NodeRoom

Placement = tuple[tuple[int, ...], ...]
"""Devices of every stage, ascending."""

DeviceTypes = tuple[int, ...]
"""The type of device of each of a stage's replicas; see `Placer.types`."""


MOST_TYPES = 8
"""Types of devices up to which a device's own rate makes another type."""


class Placer:
    """Devices of one cluster.

    `types` are the first devices of each type, and `type_of` says for every device which of them it equals. Devices that differ
    in the rates of their own links are of one type where there would be more than `MOST_TYPES` of them otherwise.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.homogeneous = cluster.homogeneous
        devices = cluster.devices
        if len(set(cluster.wiring.rates)) > 1 and len({devices.index(device) for device in devices}) > MOST_TYPES:
            devices = tuple(replace(device, bandwidth_bytes_per_s=None) for device in devices)
        firsts = [0] * len(devices) if self.homogeneous else [devices.index(device) for device in devices]
        self.types = sorted(set(firsts))
        self.type_of = [self.types.index(first) for first in firsts]
        self.counts = [self.type_of.count(type) for type in range(len(self.types))]
        self.memory_bytes = [devices[first].memory_bytes for first in self.types]
        self._one_node = len(set(cluster.nodes)) == 1
        of: dict[int, list[int]] = {}
        for device, node in enumerate(cluster.nodes):
            of.setdefault(node, []).append(device)
        self._nodes = tuple(tuple(of[node]) for node in sorted(of))
        self._room = NodeRoom(self._nodes)
        self._known: dict[tuple[int, ...], Placement] = {}

    def equal(self, counts: tuple[int, ...]) -> Placement:
        """Devices for stages in stage order, on a cluster of equal devices.

        Args:
            counts: replicas of each stage; together at most the cluster's devices.
        """
        if counts not in self._known:
            apart = not self._one_node and any(_straddles(self.cluster, devices) for devices in _ranges(counts))
            self._known[counts] = self._room.deal(counts) if apart else tuple(_ranges(counts))
        return self._known[counts]

    def rings(self, count: int) -> tuple[tuple[int, ...], ...]:
        """Devices of which one ring is as fast as any of so many devices: in as few nodes as possible, and in as many."""
        return tuple(order[:count] for order in self._orders)

    @cached_property
    def _orders(self) -> tuple[tuple[int, ...], ...]:
        """All devices, node by node and one of each node after the other."""
        nodes = sorted(self._nodes, key=len, reverse=True)
        in_turn = (d for devices in itertools.zip_longest(*nodes) for d in devices if d is not None)
        return tuple(d for devices in nodes for d in devices), tuple(in_turn)

    def deal(self, counts: Sequence[int], seconds: Sequence[Sequence[float]], needs_bytes: Sequence[float]) -> list[DeviceTypes]:
        """Types for every stage under the smallest limit for which this finds any; if memory is short, the largest first.

        Args:
            counts: replicas of each stage; together at most the cluster's devices.
            seconds: of each stage on every type.
            needs_bytes: memory of each stage on one device.
        """
        enough = [[memory >= need for memory in self.memory_bytes] for need in needs_bytes]
        levels = sorted({s for row, fits in zip(seconds, enough, strict=True) for s, fit in zip(row, fits, strict=True) if fit})
        low, high, best = 0, len(levels) - 1, None
        while low <= high:
            middle = (low + high) // 2
            found = self._within(counts, seconds, enough, levels[middle])
            if found is None:
                low = middle + 1
            else:
                best, high = found, middle - 1
        if best is None:
            free, best = list(self.counts), list[DeviceTypes]([()] * len(counts))
            largest = sorted(range(len(self.types)), key=lambda k: (-self.memory_bytes[k], k))
            for s in sorted(range(len(counts)), key=lambda s: (-needs_bytes[s], s)):
                best[s] = _take(free, largest, counts[s]) or ()
        return best

    def _within(
        self, counts: Sequence[int], seconds: Sequence[Sequence[float]], enough: Sequence[Sequence[bool]], limit_s: float
    ) -> list[DeviceTypes] | None:
        free = list(self.counts)
        allowed = [
            sorted((k for k, s in enumerate(row) if fits[k] and s <= limit_s), key=lambda k: (-row[k], self.memory_bytes[k], k))
            for row, fits in zip(seconds, enough, strict=True)
        ]
        out: list[DeviceTypes] = [()] * len(counts)
        for s in sorted(range(len(counts)), key=lambda s: (sum(free[k] for k in allowed[s]) - counts[s], -counts[s], s)):
            taken = _take(free, allowed[s], counts[s])
            if taken is None:
                return None
            out[s] = taken
        # Faster devices that nobody asked for.
        for s in sorted(range(len(counts)), key=lambda s: (-max(seconds[s][k] for k in out[s]), s)):
            worst = max(seconds[s][k] for k in out[s])
            better = [k for k in reversed(allowed[s]) if seconds[s][k] < worst and free[k] >= counts[s]]
            if better:
                for k in out[s]:
                    free[k] += 1
                out[s] = (better[0],) * counts[s]
                free[better[0]] -= counts[s]
        return out

    @cached_property
    def mean_rates(self) -> list[float]:
        """The mean rate of the links of each type's devices, in bytes per second."""
        out = []
        for k, count in enumerate(self.counts):
            own = [rate for rate, type in zip(self.cluster.wiring.mean_rates, self.type_of, strict=True) if type == k]
            out.append(count / sum(1 / rate for rate in own) if len(set(own)) > 1 else own[0])
        return out

    def near(self, types: Sequence[DeviceTypes], bytes_between: dict[tuple[int, int], float]) -> Placement:
        """Choose devices of the given types: one node for a stage if possible, that of the stages it exchanges most with.

        Args:
            bytes_between: (stage, stage) -> bytes of one micro-batch over that edge.
        """
        if self.cluster.wiring.by_node is None:
            return self._linked(types, bytes_between)
        nodes = self.cluster.nodes
        free: dict[tuple[int, int], list[int]] = {}
        for device, type in enumerate(self.type_of):
            free.setdefault((type, nodes[device]), []).append(device)
        talks: list[list[tuple[int, float]]] = [[] for _ in types]
        for (s, t), size in bytes_between.items():
            talks[s].append((t, size))
            talks[t].append((s, size))
        out: list[tuple[int, ...]] = [()] * len(types)
        for s in sorted(range(len(types)), key=lambda s: (-len(types[s]), s)):
            weight: dict[int, float] = {}
            for other, size in talks[s]:
                for d in out[other]:
                    weight[nodes[d]] = weight.get(nodes[d], 0.0) + size / len(out[other])
            chosen: list[int] = []
            for type in sorted(set(types[s])):
                lack = types[s].count(type)
                while lack:
                    there = {node: len(left) for (k, node), left in free.items() if k == type and left}
                    taken = {nodes[d] for d in chosen}
                    node = max(
                        there,
                        key=lambda n: (
                            min(there[n], lack),
                            n in taken,
                            weight.get(n, 0.0),
                            -there[n] if lack > 1 else there[n],
                            -n,
                        ),
                    )
                    got = free[type, node][:lack]
                    del free[type, node][:lack]
                    chosen += got
                    lack -= len(got)
            out[s] = tuple(sorted(chosen))
        return tuple(out)

    def _linked(self, types: Sequence[DeviceTypes], bytes_between: dict[tuple[int, int], float]) -> Placement:
        """Devices of the given types, each the one on which messages to all other stages take least.

        Stages that are placed already count with their devices, the others with the mean link of the device.
        """
        wiring = self.cluster.wiring
        talks: list[dict[int, float]] = [{} for _ in types]
        for (s, t), size in bytes_between.items():
            talks[s][t] = talks[s].get(t, 0.0) + size
            talks[t][s] = talks[t].get(s, 0.0) + size
        free = list(range(len(self.type_of)))
        out: list[tuple[int, ...]] = [()] * len(types)

        def seconds(d: int, s: int, chosen: list[int]) -> tuple[float, float]:
            """Of messages to placed stages and to others; then of the ring's slowest link to the devices chosen before."""
            took = 0.0
            for t, size in talks[s].items():
                rates = [wiring.link(d, other).bandwidth_bytes_per_s for other in out[t]] or [wiring.mean_rates[d]]
                took += size * sum(1 / rate for rate in rates) / len(rates)
            return took, max((1 / wiring.link(d, other).bandwidth_bytes_per_s for other in chosen), default=0.0)

        for s in sorted(range(len(types)), key=lambda s: (-len(types[s]), -sum(talks[s].values()), s)):
            chosen: list[int] = []
            for type in sorted(types[s]):
                # Of devices with the same links the first one stands for all.
                some = {wiring.places[d]: d for d in reversed(free) if self.type_of[d] == type}
                found = min(some.values(), key=lambda d: (*reversed(seconds(d, s, chosen)), d))
                free.remove(found)
                chosen.append(found)
            out[s] = tuple(sorted(chosen))
        return tuple(out)


def _take(free: list[int], types: Sequence[int], count: int) -> DeviceTypes | None:
    """Take `count` devices off `free`: of the first type that has them all, else of the first types; None if there are too few."""
    if sum(free[k] for k in types) < count:
        return None
    whole = next((k for k in types if free[k] >= count), None)
    taken = [whole] * count if whole is not None else [k for k in types for _ in range(free[k])][:count]
    for k in taken:
        free[k] -= 1
    return tuple(taken)


def _ranges(counts: Sequence[int]) -> Iterator[tuple[int, ...]]:
    start = 0
    for count in counts:
        yield tuple(range(start, start + count))
        start += count


def _straddles(cluster: Cluster, devices: tuple[int, ...]) -> bool:
    """Whether a range lies in more nodes than it must: one that is no whole number of nodes, across a boundary."""
    nodes = cluster.nodes
    if nodes[devices[0]] == nodes[devices[-1]]:
        return False
    before = devices[0] > 0 and nodes[devices[0] - 1] == nodes[devices[0]]
    return before or nodes.count(nodes[devices[0]]) >= len(devices)
