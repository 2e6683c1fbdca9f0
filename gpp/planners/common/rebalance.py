"""Better devices and boundaries for finished plans on devices of unequal speed or memory.

The placer deals devices out before anything is known of bubbles. Here the local search moves on the plan's own devices: two stages
exchange theirs, all or one by one; one comes from the idle ones; a stage gets more or fewer; boundaries move one by one. What
changes a stage's work is tried with the placer's devices, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from gpp.cluster import Cluster
from gpp.planners.common.incumbent import Incumbent
from gpp.planners.common.local_search import EqualMicrobatches, climb, climb_best
from gpp.planners.common.moves import ANY_STAGES, CHAINS, Around, Point, boundaries
from gpp.planners.common.placement import Placement

PATIENCE = 6
"""Simulations without a better plan that end a step."""

REBALANCED = 3
"""Micro-batch sizes whose best plans are rebalanced."""

ALL_STAGES = 10
"""Plans of at most so many stages are changed everywhere, larger ones at the stages that hold them up."""


def rebalance(incumbent: Incumbent, order: Sequence[int] | None = None) -> None:
    """Improve the best plans on their own devices; then by steps that deal the devices out anew, and on those once more.

    Args:
        order: an order of the operators in which all stages of a chain stay intervals; None for stages of any shape.
    """
    moves = (exchanges, placed_anew, resized, moved_boundaries)
    hill = EqualMicrobatches(incumbent=incumbent, moves=moves, order=order, keeps_devices=True, all_stages=ALL_STAGES)
    for plan, seconds in incumbent.best_by_size()[:REBALANCED]:
        climb(hill, [(hill.start(plan), seconds)], patience=PATIENCE)
    climb_best(incumbent, PATIENCE, moves=ANY_STAGES if order is None else CHAINS, order=order)
    for plan, seconds in incumbent.best_by_size()[:1]:
        climb(hill, [(hill.start(plan), seconds)], patience=PATIENCE)


def placed_anew(around: Around, point: Point) -> Iterator[Point]:
    """The point's stages on the placer's devices."""
    yield replace(point, devices=None)


def moved_boundaries(around: Around, point: Point) -> Iterator[Point]:
    """`boundaries` on the plan's own devices and on the placer's."""
    for moved in boundaries(around, point):
        yield moved
        yield replace(moved, devices=None)


def resized(around: Around, point: Point) -> Iterator[Point]:
    """A stage with another number of replicas: on the fastest, the largest, the nearest devices within reach, or the placer's."""
    assert point.devices is not None
    cluster, b = around.assessor.cluster, point.sizes[0]
    idle = sorted(set(range(cluster.num_devices)).difference(*point.devices))
    for s in sorted(around.hot):
        mask, count = point.parts[s]
        for r in (x for x in around.replicas(b) if x != count and x <= count + len(idle)):
            other = replace(point, parts=(*point.parts[:s], (mask, r), *point.parts[s + 1 :]))
            for own in _selections(cluster, point.devices[s], idle, r):
                yield replace(other, devices=(*point.devices[:s], own, *point.devices[s + 1 :]))
            yield replace(other, devices=None)


def _selections(cluster: Cluster, own: tuple[int, ...], idle: list[int], count: int) -> list[tuple[int, ...]]:
    """A stage's devices with some idle ones, or fewer: the fastest, the largest, the nearest."""
    pool = [*own, *idle] if count > len(own) else list(own)

    def rate(d: int) -> float:
        return cluster.devices[d].speed_factor * max(cluster.devices[d].peak_flop_per_s.values())

    def away(d: int) -> float:
        if cluster.wiring.by_node is not None:
            return cluster.nodes[d] != cluster.nodes[own[0]]
        return 0.0 if d == own[0] else 1 / cluster.link(d, own[0]).bandwidth_bytes_per_s

    fast = sorted(pool, key=lambda d: (-rate(d), d not in own, d))[:count]
    large = sorted(pool, key=lambda d: (-cluster.devices[d].memory_bytes, d not in own, d))[:count]
    near = sorted(pool, key=lambda d: (d not in own, away(d), d))[:count]
    return list(dict.fromkeys(tuple(sorted(some)) for some in (fast, large, near)))


def exchanges(around: Around, point: Point) -> Iterator[Point]:
    """Two stages' devices exchanged, all or one by one; one device for an idle one. Only where types or places differ."""
    assert point.devices is not None
    devices, hot = point.devices, around.hot
    placer, places = around.assessor.placer, around.assessor.cluster.wiring.places

    def label(d: int) -> tuple[int, int]:
        return placer.type_of[d], places[d]

    def with_devices(changes: dict[int, tuple[int, ...]]) -> Point:
        changed: Placement = tuple(tuple(sorted(changes.get(s, own))) for s, own in enumerate(devices))
        return replace(point, devices=changed)

    idle = sorted(set(range(len(places))).difference(*devices))
    for s in sorted(hot):
        mine = {label(d): d for d in devices[s]}
        for d in {label(d): d for d in idle}.values():
            for old in mine.values():
                if label(old) != label(d):
                    yield with_devices({s: (*(x for x in devices[s] if x != old), d)})
        for t, other in enumerate(devices):
            if t == s or (t in hot and t < s):
                continue
            if len(other) == len(devices[s]) and sorted(map(label, other)) != sorted(map(label, devices[s])):
                yield with_devices({s: other, t: devices[s]})
                if len(other) == 1:
                    continue
            for d in {label(d): d for d in other}.values():
                for old in mine.values():
                    if label(old) != label(d):
                        changes = {s: (*(x for x in devices[s] if x != old), d), t: (*(x for x in other if x != d), old)}
                        yield with_devices(changes)
