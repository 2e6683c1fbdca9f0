"""Moves between plans whose devices may hold several stages: as those of `gpp.planners.common.moves`, on points with devices."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

from gpp.graph.op_graph import OpGraph, bits, mask_of
from gpp.planners.common.moves import Around, Point, connected, heads

LIGHTEST = 2
"""Devices with the least to do that a piece may go to, beside those that it talks to."""

FEW_DEVICES = 2
"""Devices up to which a piece may go to any set of them."""

Piece = tuple[int, tuple[int, ...]]
"""Operators, and the devices of the stage that they are."""


def any_size(around: Around, point: Point) -> Iterator[Point]:
    """All stages with the next smaller or larger micro-batch size that their replicas divide."""
    every = [b for b in around.assessor.costs.microbatch_sizes if all(b % count == 0 for _, count in point.parts)]
    at = every.index(point.sizes[0])
    for size in (*every[max(0, at - 1) : at], *every[at + 1 : at + 2]):
        yield replace(point, sizes=(size,) * len(point.sizes))


def cut(around: Around, point: Point) -> Iterator[Point]:
    """A stage in two on its own devices."""
    for s in sorted(around.hot):
        mask, devices = point.parts[s][0], _devices(point)[s]
        for piece in pieces(around.graph, mask):
            yield with_pieces(point, {s: ((piece, devices), (mask ^ piece, devices))})


def joined(around: Around, point: Point) -> Iterator[Point]:
    """Two stages of the same devices as one."""
    where = _devices(point)
    for s, (mask, _) in enumerate(point.parts):
        for t in range(s + 1, len(point.parts)):
            union = mask | point.parts[t][0]
            if where[s] == where[t] and around.graph.is_convex(union):
                yield with_pieces(point, {s: ((union, where[s]),), t: ()})


def moved(around: Around, point: Point) -> Iterator[Point]:
    """A whole stage on other devices, as a stage of its own or joined with one of theirs."""
    for s in sorted(around.hot):
        for devices in _targets(around, point, s):
            yield from _given(around.graph, point, s, point.parts[s][0], devices)


def handed_over(around: Around, point: Point) -> Iterator[Point]:
    """A piece of a stage on other devices, as a stage of its own or joined with one of theirs."""
    for s in sorted(around.hot):
        mask = point.parts[s][0]
        for devices in _targets(around, point, s):
            for piece in pieces(around.graph, mask):
                for given in (piece, mask ^ piece):
                    yield from _given(around.graph, point, s, given, devices)


def scattered(around: Around, point: Point) -> Iterator[Point]:
    """A stage of several devices as a piece that stays on all of them, and the unconnected parts of the rest dealt out to them."""
    for s in sorted(around.hot):
        mask, own = point.parts[s][0], _devices(point)[s]
        for piece in (0, *pieces(around.graph, mask)) if len(own) > 1 else ():
            for stays in (piece, mask ^ piece):
                parts = connected(around.graph, mask ^ stays)
                if len(parts) < 2:
                    continue
                shares = [0] * len(own)
                for i, part in enumerate(parts):
                    shares[i % len(own)] |= part
                new = [(stays, own)] if stays else []
                yield with_pieces(point, {s: (*new, *((share, (own[i],)) for i, share in enumerate(shares) if share))})


def exchanged(around: Around, point: Point) -> Iterator[Point]:
    """Two stages with each other's devices."""
    where = _devices(point)
    for s in sorted(around.hot):
        for t, own in enumerate(where):
            if own != where[s] and len(own) == len(where[s]) and (t > s or t not in around.hot):
                yield with_pieces(point, {s: ((point.parts[s][0], own),), t: ((point.parts[t][0], where[s]),)})


def pieces(graph: OpGraph, mask: int) -> Iterator[int]:
    """Parts of a stage that may be a stage of their own, each once: what is before the rest, or beside it.

    What depends on nothing that the stage receives; what other stages wait for; each of the parts that no tensor connects; the
    first operators, any few of a small stage, eighths of a large one.
    """
    found = dict.fromkeys((independent(graph, mask), needed(graph, mask), *connected(graph, mask), *heads(mask)))
    yield from (piece for piece in found if piece not in (0, mask))


def independent(graph: OpGraph, mask: int) -> int:
    """The operators of a set that depend on none outside it."""
    return mask_of([op for op in bits(mask) if not graph.ancestors[op] & ~mask])


def needed(graph: OpGraph, mask: int) -> int:
    """The operators of a set on which some outside it depends."""
    return mask_of([op for op in bits(mask) if graph.descendants[op] & ~mask])


def with_pieces(point: Point, changed: dict[int, tuple[Piece, ...]]) -> Point:
    """The point with stages replaced by others, or by none; all have one micro-batch size and k."""
    after: list[Piece] = []
    for s, ((mask, _), own) in enumerate(zip(point.parts, _devices(point), strict=True)):
        after += changed.get(s, ((mask, own),))
    return point_of(after, point.sizes[0])


def point_of(stages: list[Piece], microbatch_size: int) -> Point:
    """The point of these stages, with the data's edges only."""
    return Point(
        parts=tuple((mask, len(own)) for mask, own in stages),
        sizes=(microbatch_size,) * len(stages),
        ks=(1,) * len(stages),
        chain=False,
        devices=tuple(own for _, own in stages),
    )


def _given(graph: OpGraph, point: Point, s: int, piece: int, devices: tuple[int, ...]) -> Iterator[Point]:
    """Operators of stage s on other devices."""
    left, where = point.parts[s][0] ^ piece, _devices(point)
    rest = ((left, where[s]),) if left else ()
    yield with_pieces(point, {s: (*rest, (piece, devices))})
    for t, own in enumerate(where):
        union = piece | point.parts[t][0]
        if t != s and own == devices and graph.is_convex(union):
            yield with_pieces(point, {s: rest, t: ((union, own),)})


def _targets(around: Around, point: Point, s: int) -> list[tuple[int, ...]]:
    """Sets of devices that operators of stage s may go to.

    Of few devices every set. Of many: those of stages that it talks to, those with least to do, its own with one more or one less.
    """
    where, allowed, count = _devices(point), around.replicas(point.sizes[0]), around.assessor.cluster.num_devices
    own = where[s]
    if count <= FEW_DEVICES:
        every = (g for size in allowed if size <= count for g in itertools.combinations(range(count), size))
        return [group for group in every if group != own]
    loads, near = around.assessor.loads_s(point.parts, where, point.sizes[0]), 0
    for op in bits(point.parts[s][0]):
        near |= around.graph.successors[op] | around.graph.predecessors[op]
    groups = dict.fromkeys(other for other in where if other != own)
    groups |= dict.fromkeys((device,) for device in range(count) if loads[device] == 0.0)
    alike = sorted((max(loads[d] for d in group), group) for group in groups if len(group) == len(own))
    found = [group for _, group in alike[:LIGHTEST]]
    found += [other for (there, _), other in zip(point.parts, where, strict=True) if other in groups and there & near]
    lightest = min((d for d in range(count) if d not in own), key=lambda d: (loads[d], d), default=None)
    if lightest is not None:
        found.append(tuple(sorted((*own, lightest))))
    if len(own) > 1:
        busiest = max(own, key=lambda d: (loads[d], d))
        found.append(tuple(d for d in own if d != busiest))
    return [group for group in dict.fromkeys(found) if len(group) in allowed]


def _devices(point: Point) -> tuple[tuple[int, ...], ...]:
    assert point.devices is not None, "these moves start from a plan's own devices"
    return point.devices
