"""Finished candidates: whether they fit, and a lower bound on their iteration time.

The bound holds for synchronous schedules that keep no more than the plan's samples in flight. Under other schedules it only
decides which candidates are worth a simulation; what wins is always the best prediction.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import starmap
from typing import NamedTuple

from gpp.cost.holding import Held
from gpp.cost.stage import finish_s
from gpp.cost.together import together
from gpp.graph.op_graph import bits
from gpp.graph.sums import listed
from gpp.planners.common.placement import DeviceTypes, Placement, Placer
from gpp.planners.common.stage_costs import StageCosts
from gpp.planners.search.numbers import Posed
from gpp.planners.search.ways import DeviceGroup, MessageRoute, StageWays

Part = tuple[int, int]
"""A stage: operator mask and number of devices."""

Parts = tuple[Part, ...]
"""All stages of a partition."""


class Candidate(NamedTuple):
    """A partition with device counts and a micro-batch size, known to fit.

    Args:
        bound_s: no schedule finishes an iteration sooner.
        depth: stages on the longest path.
        placement: devices of every stage.
    """

    bound_s: float
    depth: int
    microbatch_size: int
    chain: bool
    parts: Parts
    placement: Placement


@dataclass(frozen=True, slots=True)
class Shortage:
    """The stage of a candidate that lacks most memory, in units of its device's memory."""

    mask: int
    need_bytes: float
    have_bytes: float


class Assessor:
    """Puts partitions into stage order, checks their memory on the devices that they will get, bounds their time."""

    def __init__(self, costs: StageCosts) -> None:
        self.costs, self.problem, self.graph, self.cluster = costs, costs.problem, costs.graph, costs.cluster
        self._homogeneous = costs.cluster.homogeneous
        self._ways: dict[int, StageWays] = {}
        self._read = listed(map(bits, costs.graph.predecessors))
        self._groups: dict[tuple[int, ...], DeviceGroup] = {}
        self._routes: dict[tuple[float, tuple[tuple[float, float], ...]], MessageRoute] = {}
        self._states: dict[tuple[int, int, int], tuple[Held, ...]] = {}
        self._needs: dict[tuple[int, int, int, int, int], tuple[float, float]] = {}
        self._times: dict[tuple[int, int, int, object], tuple[float, float, float]] = {}
        self._bytes: dict[tuple[int, int], tuple[float, float]] = {}
        self._updates: dict[tuple[int, tuple[int, ...]], float] = {}
        self.placer = Placer(costs.cluster)
        self.posed = Posed(costs.problem, costs.replicas, self.needs)

    def assess(
        self,
        parts: Sequence[Part],
        microbatch_size: int,
        *,
        chain: bool = False,
        placement: Sequence[tuple[int, ...]] | None = None,
        types: Sequence[DeviceTypes] | None = None,
        below_s: float = math.inf,
    ) -> Candidate | Shortage | None:
        """A candidate; or its lack of memory, if it does not fit; or None, if its stages form a cycle or devices are too few.

        Args:
            parts: in any order, or for a chain in the chain's order.
            placement: devices of each part, which parts may share; types: the types of the devices of each part; None for the
                placer's choice.
            below_s: a candidate whose bound is not below that is None, too.
        """
        shared = placement is not None and _shared(parts, placement)
        if shared and placement and max(self.loads_s(parts, placement, microbatch_size)) >= below_s:
            return None
        ways = self._taken(parts, microbatch_size)
        if self._homogeneous and math.isfinite(below_s) and ways.least_s() >= below_s:
            return None
        order = ways.arrange(chain)
        if order is None:
            return None
        ordered = tuple([parts[p] for p in order])
        if placement is not None:
            given = {mask: devices for (mask, _), devices in zip(parts, placement, strict=True)}
            placed: Placement | None = tuple(given[mask] for mask, _ in ordered)
        elif types is not None:
            asked = {mask: own for (mask, _), own in zip(parts, types, strict=True)}
            placed = self.placer.near([asked[mask] for mask, _ in ordered], self._between(ordered, microbatch_size, ways))
        else:
            placed = self._place(ordered, microbatch_size, ways)
        if placed is None:
            return None
        if shared or not ways.fits(self.costs.limit_bytes):  # that of the smallest device
            short = self._shortage(ordered, placed, microbatch_size, ways.depths())
            if short is not None:
                return short
        ways.place(placed)
        bound = ways.bound(shared, below_s)
        if shared:
            bound = max(bound, *self.loads_s(ordered, placed, microbatch_size))
        return None if bound >= below_s else Candidate(bound, ways.deepest, microbatch_size, chain, ordered, placed)

    def _taken(self, parts: Sequence[Part], b: int) -> StageWays:
        """The ways through parts of a micro-batch size, not arranged yet."""
        ways = self._ways.get(b)
        if ways is None:
            ways = self._ways[b] = StageWays(self, b, *self._read, self._groups)
        ways.take(parts)
        return ways

    def least_s(self, mask: int, num_replicas: int, microbatch_size: int) -> float:
        """A lower bound on the iteration by one stage alone, wherever its replicas are, on a cluster of equal devices."""
        regime, count = self.problem.regime, self.problem.minibatch_size // microbatch_size
        trainable = self.costs.trainable_bytes(mask)
        update = min(finish_s(self.problem, trainable, ring) for ring in self.placer.rings(num_replicas))
        return count * sum(self.stage_s(mask, microbatch_size, range(num_replicas))) + regime.minibatches * update

    def loads_s(self, parts: Sequence[Part], placement: Sequence[tuple[int, ...]], microbatch_size: int) -> list[float]:
        """The seconds of each device in an iteration: the passes and updates of all parts that it holds."""
        out, count = [0.0] * self.cluster.num_devices, self.problem.minibatch_size // microbatch_size
        held = dict[tuple[int, ...], int]()
        for (mask, _), devices in zip(parts, placement, strict=True):
            took = count * sum(self.stage_s(mask, microbatch_size, devices))
            for device in devices:
                out[device] += took
            held[devices] = held.get(devices, 0) | mask
        for devices, mask in held.items():  # parts on the same devices sum their gradients at once
            took = self.update_s(mask, devices)
            for device in devices:
                out[device] += took
        return out

    def slow_parts(
        self, parts: Sequence[Part], microbatch_size: int, share: float, *, chain: bool, most: int | None = None
    ) -> set[int]:
        """Parts of a candidate, in the given order, that hold the iteration up.

        Those that alone keep it at `share` of its bound or more, and those on the longest way to the slowest one.

        Args:
            most: so many of them, the slowest ones; None for all.
        """
        ways = self._taken(parts, microbatch_size)
        order = ways.arrange(chain)
        assert order is not None, "a candidate has no cycle"
        ordered = tuple([parts[p] for p in order])
        placement = self._place(ordered, microbatch_size, ways)
        assert placement is not None, "a candidate has devices"
        ways.place(placement)
        ways.bound(False, math.inf)
        values, came_from = ways.walked()
        slowest = values.index(max(values))
        slow = {s for s, value in enumerate(values) if value >= share * values[slowest]}
        s = slowest
        while s >= 0:
            slow.add(s)
            s = came_from[s]
        if most is not None:
            slow = set(sorted(slow, key=lambda s: (-values[s], s))[:most])
        return {order[s] for s in slow}

    def _place(self, parts: Parts, b: int, ways: StageWays) -> Placement | None:
        """The devices of every stage; None if there are not enough."""
        counts = tuple([count for _, count in parts])
        if sum(counts) > self.cluster.num_devices:
            return None
        if self._homogeneous:
            return self.placer.equal(counts)
        placer, depth = self.placer, ways.depths()
        seconds = [self.seconds_by_type(mask, count, b) for mask, count in parts]
        needs = [self.need_bytes(mask, count, b, d, max(depth)) for (mask, count), d in zip(parts, depth, strict=True)]
        return placer.near(placer.deal(counts, seconds, needs), self._between(parts, b, ways))

    def seconds_by_type(self, mask: int, count: int, b: int) -> list[float]:
        """Seconds of both passes of a stage on each type of device; of its transfers, if they are longer and links differ."""
        out = [sum(self.stage_s(mask, b, (first,) * count)) for first in self.placer.types]
        if self.cluster.wiring.by_node is None:
            sums = self.problem.sums(mask)
            size = max(sums.incoming + sums.outgoing_back, sums.outgoing + sums.incoming_back) * b / count
            out = [max(took, size / rate) for took, rate in zip(out, self.placer.mean_rates, strict=True)]
        return out

    def _between(self, parts: Parts, b: int, ways: StageWays) -> dict[tuple[int, int], float]:
        """Bytes of a micro-batch over each edge, both ways."""
        return {
            (s, t): b * sum(max(size, 0.0) for size in self.crossing(parts[s][0], parts[t][0]))
            for s, nexts in enumerate(ways.nexts())
            for t in nexts
        }

    def ops(self, mask: int) -> tuple[int, ...]:
        """The operators of a stage."""
        return tuple(bits(mask))

    def need_bytes(self, mask: int, count: int, b: int, distance: int, depth: int) -> float:
        """Memory of a stage on one device with the micro-batches in flight of its distance to the sink, in a plan of a depth."""
        return self.needs(mask, count, b, distance, depth)[0]

    def needs(self, mask: int, count: int, b: int, distance: int, depth: int) -> tuple[float, float]:
        """`need_bytes`, and of these what is there only while the stage computes."""
        key = (mask, count, b, distance, depth)
        found = self._needs.get(key)
        if found is not None:
            return found
        held = self.costs.held(mask, b // count)
        found = self._needs[key] = max(starmap(held.peak, self.states(b, distance, depth))), held.passing
        return found

    def states(self, b: int, distance: int, depth: int) -> tuple[Held, ...]:
        """The fullest states of a stage of a distance to the sink, in a plan of a depth."""
        found = self._states.get((b, distance, depth))
        if found is None:
            holds, most = self.problem.regime.holds, self.problem.minibatch_size // b
            found = self._states[b, distance, depth] = holds.states(holds.full(distance, most), holds.late(distance, depth, most))
        return found

    def in_flight(self, b: int, distance: int) -> int:
        """The micro-batches that such a stage holds in full."""
        return self.problem.regime.held(distance, self.problem.minibatch_size // b)

    def _shortage(self, parts: Parts, placement: Placement, b: int, depth: list[int]) -> Shortage | None:
        """The bytes missing on the device that misses most; where it holds several stages, its largest one stands for all."""
        needs: dict[int, list[tuple[float, float, int]]] = {}
        for (mask, count), devices, d in zip(parts, placement, depth, strict=True):
            own = (*self.needs(mask, count, b, d, max(depth)), mask)
            for device in devices:
                needs.setdefault(device, []).append(own)
        short: list[tuple[float, float, float, int]] = []
        for device, held in needs.items():
            have = self.cluster.devices[device].memory_bytes
            need = together((n, passing) for n, passing, _ in held) if len(held) > 1 else held[0][0]
            if need > have:
                short.append((need / have, need, have, max(held)[-1]))
        if not short:
            return None
        _, need, have, mask = max(short)
        return Shortage(mask, need, have)

    def stage_s(self, mask: int, b: int, devices: Sequence[int]) -> tuple[float, float]:
        """Seconds of a forward and of a backward of a stage."""
        return self.split_s(mask, b, devices)[:2]

    def split_s(self, mask: int, b: int, devices: Sequence[int]) -> tuple[float, float, float]:
        """As `stage_s`, with the seconds of the weights' gradients as the last value, if the schedule leaves them for later."""
        key = (mask, b, len(devices), None if self._homogeneous else devices)
        found = self._times.get(key)
        if found is None:
            found = self._times[key] = self.problem.split_times(tuple(bits(mask)), b, tuple(devices))
        return found

    def crossing(self, first: int, second: int) -> tuple[float, float]:
        """Bytes per sample over an edge, forwards and backwards; what never comes back counts as minus infinity."""
        found = self._bytes.get((first, second))
        if found is None:
            tensors = self.problem.crossing(first, second)
            back = [t.bytes_per_sample for t in tensors if t.differentiable]
            found = sum(self.problem.sent_bytes(t) for t in tensors), sum(back) if back or not tensors else -math.inf
            self._bytes[first, second] = found
        return found

    def route(self, a: tuple[int, ...], b: tuple[int, ...]) -> MessageRoute:
        """The share of a micro-batch in the largest message between two groups of devices, and the links for it."""
        few, many = sorted((len(a), len(b)))
        # Replicas that do not line up share a range between two messages; the larger has half of it.
        share = 1 / many if many % few == 0 else 0.5 / many
        links = [(link.latency_s, 1 / link.bandwidth_bytes_per_s) for link in self.cluster.wiring.between(a, b)]
        if not set(a).isdisjoint(b):
            links.append((0.0, 0.0))  # from a device to itself
        key = share, tuple(links)
        if key not in self._routes:
            self._routes[key] = MessageRoute(*key)
        return self._routes[key]

    def update_s(self, mask: int, devices: tuple[int, ...]) -> float:
        """Gradient all-reduce and the optimizer's step."""
        key = (mask, devices)
        found = self._updates.get(key)
        if found is None:
            found = self._updates[key] = finish_s(self.problem, self.costs.trainable_bytes(mask), devices)
        return found


def _shared(parts: Sequence[Part], placement: Sequence[tuple[int, ...]]) -> bool:
    """Whether any device holds several parts."""
    return len({device for devices in placement for device in devices}) < sum(count for _, count in parts)
