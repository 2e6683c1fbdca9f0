"""Which devices a stage gets: inside one node first, near its neighbours, the heaviest stages on the fastest devices.

Objective: no all-reduce and few bytes between nodes; on unequal devices, first the shortest time of the slowest stage.

A stage's replicas exchange its whole gradients at the end of every mini-batch, so they go into one node wherever they fit. On
equal devices the numbers of replicas decide alone (`Placer.equal`): stages of whole nodes first, then the others in stage
order, each into its predecessor's node if there is room, else into the fullest with room. On unequal ones (`Placer.unequal`)
the stages with most work for each replica choose first: the node whose slowest device that they would take is fastest,
then the one that holds most of what they talk to.

Complexity: O(S N + D) for S stages and N nodes. Greedy: the candidates of a search are judged on the devices they get,
so a placement that costs time costs the partition its rank.
"""

from __future__ import annotations

from collections.abc import Sequence

from gpp.cluster import Cluster

Placement = tuple[tuple[int, ...], ...]
"""Devices of every stage, ascending."""


class Placer:
    """Devices of one cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.homogeneous = cluster.homogeneous
        self._one_node = len(set(cluster.nodes)) == 1
        self._known: dict[tuple[int, ...], Placement] = {}

    def equal(self, counts: tuple[int, ...]) -> Placement:
        """Devices for stages in stage order, on a cluster of equal devices.

        Args:
            counts: replicas of each stage; together at most the cluster's devices.
        """
        if counts not in self._known:
            ranges = _ranges(counts)
            if not self._one_node and any(_straddles(self.cluster, devices) for devices in ranges):
                ranges = self._into_nodes(counts)
            self._known[counts] = ranges
        return self._known[counts]

    def _into_nodes(self, counts: tuple[int, ...]) -> Placement:
        free = self._free()
        size = max(len(devices) for devices in free.values())
        out: list[tuple[int, ...]] = [()] * len(counts)
        before = 0
        for s in sorted(range(len(counts)), key=lambda s: (-(counts[s] // size), s)):
            room = [node for node, devices in free.items() if len(devices) >= counts[s]]
            if room:
                node = before if before in room else min(room, key=lambda node: (len(free[node]), node))
                chosen, before = free[node][: counts[s]], node
            else:
                fullest = sorted(free, key=lambda node: (-len(free[node]), node))
                chosen = [d for node in fullest for d in free[node]][: counts[s]]
            for d in chosen:
                free[self.cluster.nodes[d]].remove(d)
            out[s] = tuple(sorted(chosen))
        return tuple(out)

    def unequal(
        self,
        counts: Sequence[int],
        bytes_between: dict[tuple[int, int], float],
        loads_s: Sequence[float],
        needs_bytes: Sequence[float],
    ) -> Placement:
        """Devices for stages in stage order, on a cluster of unequal devices.

        Args:
            counts: replicas of each stage; together at most the cluster's devices.
            bytes_between: (stage, stage) -> bytes of one micro-batch over that edge.
            loads_s: seconds of each stage on one replica at full speed.
            needs_bytes: memory of each stage on one device.
        """
        free = self._free()
        for devices in free.values():
            devices.sort(key=lambda d: (-self.cluster.devices[d].speed_factor, d))
        talks: list[list[tuple[int, float]]] = [[] for _ in counts]
        for (s, t), size in bytes_between.items():
            talks[s].append((t, size))
            talks[t].append((s, size))
        out: list[tuple[int, ...]] = [()] * len(counts)
        for s in sorted(range(len(counts)), key=lambda s: (-loads_s[s], s)):
            chosen = _choose(self.cluster, counts[s], free, out, talks[s], needs_bytes[s])
            for d in chosen:
                free[self.cluster.nodes[d]].remove(d)
            out[s] = tuple(sorted(chosen))
        return tuple(out)

    def _free(self) -> dict[int, list[int]]:
        free: dict[int, list[int]] = {}
        for device, node in enumerate(self.cluster.nodes):
            free.setdefault(node, []).append(device)
        return free


def _ranges(counts: Sequence[int]) -> Placement:
    out, start = [], 0
    for count in counts:
        out.append(tuple(range(start, start + count)))
        start += count
    return tuple(out)


def _straddles(cluster: Cluster, devices: tuple[int, ...]) -> bool:
    """Whether a range lies in more nodes than it must: one that is no whole number of nodes, across a border."""
    nodes = cluster.nodes
    if nodes[devices[0]] == nodes[devices[-1]]:
        return False
    before = devices[0] > 0 and nodes[devices[0] - 1] == nodes[devices[0]]
    return before or nodes.count(nodes[devices[0]]) >= len(devices)


def _choose(
    cluster: Cluster,
    count: int,
    free: dict[int, list[int]],
    placed: list[tuple[int, ...]],
    talks: list[tuple[int, float]],
    need_bytes: float,
) -> list[int]:
    """Devices of one node that has enough of them; else of as few nodes as possible."""
    near: dict[int, float] = {}
    for other, size in talks:
        for d in placed[other]:
            near[cluster.nodes[d]] = near.get(cluster.nodes[d], 0.0) + size / len(placed[other])
    fitting = {
        node: [d for d in devices if cluster.devices[d].memory_bytes >= need_bytes] or devices for node, devices in free.items()
    }
    whole = [node for node, devices in fitting.items() if len(devices) >= count]
    if whole:

        def rank(node: int) -> tuple[float, float, int, int]:
            slowest = cluster.devices[fitting[node][count - 1]].speed_factor
            return slowest, near.get(node, 0.0), -len(free[node]), -node

        return fitting[max(whole, key=rank)][:count]
    spread = sorted(free, key=lambda node: (-len(fitting[node]), -near.get(node, 0.0), node))
    return [d for node in spread for d in fitting[node]][:count]
