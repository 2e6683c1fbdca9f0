"""Which devices a stage gets: inside one node first, near its neighbours, the heaviest stages on the fastest devices.

Objective: no all-reduce and few bytes between nodes; on unequal devices, first the shortest time of the slowest stage.

A stage's replicas exchange its whole gradients at the end of every mini-batch, so they go into one node wherever they fit; of
the nodes with room the one is taken that holds most of what the stage talks to. On equal devices the stages with most replicas
choose first (what is left then still fits the small ones); on unequal ones those with most work for each replica do.

Complexity: O(S N + D) for S stages and N nodes. Greedy: the candidates of a search are judged on the devices they get,
so a placement that costs time costs the partition its rank.
"""

from __future__ import annotations

from collections.abc import Sequence

from gpp.cluster import Cluster

Placement = tuple[tuple[int, ...], ...]
"""Devices of every stage, ascending."""


def place(
    cluster: Cluster,
    counts: Sequence[int],
    bytes_between: dict[tuple[int, int], float],
    loads_s: Sequence[float],
    needs_bytes: Sequence[float],
) -> Placement:
    """Devices for stages in stage order.

    Args:
        counts: replicas of each stage; together at most the cluster's devices.
        bytes_between: (stage, stage) -> bytes of one micro-batch over that edge.
        loads_s: seconds of each stage on one replica at full speed.
        needs_bytes: memory of each stage on one device.
    """
    ranges = _ranges(counts)
    if cluster.homogeneous and not any(_straddles(cluster, devices) for devices in ranges):
        return ranges
    free: dict[int, list[int]] = {}
    for device, node in enumerate(cluster.nodes):
        free.setdefault(node, []).append(device)
    for devices in free.values():
        devices.sort(key=lambda d: (-cluster.devices[d].speed_factor, d))
    talks: list[list[tuple[int, float]]] = [[] for _ in counts]
    for (s, t), size in bytes_between.items():
        talks[s].append((t, size))
        talks[t].append((s, size))
    out: list[tuple[int, ...]] = [()] * len(counts)
    by_count = cluster.homogeneous
    for s in sorted(range(len(counts)), key=lambda s: (-counts[s] if by_count else -loads_s[s], s)):
        chosen = _choose(cluster, counts[s], free, out, talks[s], needs_bytes[s])
        for d in chosen:
            free[cluster.nodes[d]].remove(d)
        out[s] = tuple(sorted(chosen))
    return tuple(out)


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
