"""Finished candidates: whether they fit, and a lower bound on their iteration time.

The bound holds for synchronous schedules that keep no more than the plan's samples in flight. Under other schedules it only
decides which candidates are worth a simulation; what wins is always the best prediction.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gpp.cost.amounts import StageBytes
from gpp.cost.holding import Held
from gpp.cost.stage import finish_s
from gpp.cost.together import together
from gpp.errors import InvalidPlan
from gpp.graph.op_graph import bits
from gpp.plan.build import topological_order
from gpp.planners.common.placement import DeviceTypes, Placement, Placer
from gpp.planners.common.stage_costs import StageCosts
from gpp.planners.common.ways import walk
from gpp.planners.search.numbers import Posed

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
        self._ops: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {}
        self._sent: dict[tuple[int, tuple[int, ...], int], tuple[list[tuple[int, tuple[int, ...]]], list[tuple[float, float]]]] = {}
        self._held: dict[tuple[int, int], StageBytes] = {}
        self._states: dict[tuple[int, int, int], tuple[Held, ...]] = {}
        self._needs: dict[tuple[int, int, int, int, int], tuple[float, float]] = {}
        self._in_flight: dict[tuple[int, int], float] = {}
        self._times: dict[tuple[int, int, int, object], tuple[float, float, float]] = {}
        self._bytes: dict[int, dict[int, tuple[float, float]]] = {}
        self._least: dict[tuple[int, int, int], float] = {}
        self._updates: dict[tuple[int, tuple[int, ...]], float] = {}
        self._routes: dict[tuple[int, ...], dict[tuple[int, ...], tuple[float, list[tuple[float, float]]]]] = {}
        self.placer = Placer(costs.cluster)
        self.posed = Posed(costs.problem, costs.replicas, costs.memory_scale, self.needs)

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
        hopes = self._homogeneous and math.isfinite(below_s)
        if hopes and any(self.least_s(mask, r, microbatch_size) >= below_s for mask, r in parts):
            return None
        arranged = self.arranged(parts, chain)
        if arranged is None:
            return None
        ordered, nexts, depth = arranged
        if placement is not None:
            given = {mask: devices for (mask, _), devices in zip(parts, placement, strict=True)}
            placed: Placement | None = tuple(given[mask] for mask, _ in ordered)
        elif types is not None:
            asked = {mask: own for (mask, _), own in zip(parts, types, strict=True)}
            placed = self.placer.near([asked[mask] for mask, _ in ordered], self._between(ordered, microbatch_size, nexts))
        else:
            placed = self._place(ordered, microbatch_size, nexts, depth)
        if placed is None:
            return None
        short = (self._shortage_together if shared else self._shortage)(ordered, placed, microbatch_size, depth)
        if short is not None:
            return short
        bound = max(self._walk(ordered, placed, microbatch_size, nexts, depth, below_s)[0])
        if shared:
            bound = max(bound, *self.loads_s(ordered, placed, microbatch_size))
        return None if bound >= below_s else Candidate(bound, max(depth), microbatch_size, chain, ordered, placed)

    def least_s(self, mask: int, num_replicas: int, microbatch_size: int) -> float:
        """A lower bound on the iteration by one stage alone, wherever its replicas are, on a cluster of equal devices."""
        key = (mask, num_replicas, microbatch_size)
        found = self._least.get(key)
        if found is None:
            regime, count = self.problem.regime, self.problem.minibatch_size // microbatch_size
            trainable = self.costs.trainable_bytes(mask)
            update = min(finish_s(self.problem, trainable, ring) for ring in self.placer.rings(num_replicas))
            passes = sum(self.stage_s(mask, microbatch_size, range(num_replicas)))
            found = self._least[key] = count * passes + regime.minibatches * update
        return found

    def loads_s(self, parts: Sequence[Part], placement: Sequence[tuple[int, ...]], microbatch_size: int) -> list[float]:
        """The seconds of each device in an iteration: the passes and updates of all parts that it holds."""
        out, count = [0.0] * self.cluster.num_devices, self.problem.minibatch_size // microbatch_size
        for (mask, _), devices in zip(parts, placement, strict=True):
            took = count * sum(self.stage_s(mask, microbatch_size, devices)) + self.update_s(mask, devices)
            for device in devices:
                out[device] += took
        return out

    def way_s(self, parts: Parts, placement: Placement, microbatch_size: int) -> float:
        """Seconds of both passes of one micro-batch along the longest way through parts in stage order, messages left out."""
        edges, ends = self._edges(parts), [0.0] * len(parts)
        for s, ((mask, _), devices) in enumerate(zip(parts, placement, strict=True)):
            ends[s] += sum(self.stage_s(mask, microbatch_size, devices))
            for t in edges[s]:
                ends[t] = max(ends[t], ends[s])
        return max(ends)

    def slow_parts(
        self, parts: Sequence[Part], microbatch_size: int, share: float, *, chain: bool, most: int | None = None
    ) -> set[int]:
        """Parts of a candidate, in the given order, that hold the iteration up.

        Those that alone keep it at `share` of its bound or more, and those on the longest way to the slowest one.

        Args:
            most: so many of them, the slowest ones; None for all.
        """
        walked = self._walk_parts(parts, microbatch_size, chain)
        assert walked is not None, "a candidate has devices and no cycle"
        ordered, (values, came_from) = walked
        slowest = values.index(max(values))
        slow = {s for s, value in enumerate(values) if value >= share * values[slowest]}
        s = slowest
        while s >= 0:
            slow.add(s)
            s = came_from[s]
        if most is not None:
            slow = set(sorted(slow, key=lambda s: (-values[s], s))[:most])
        index = {part: i for i, part in enumerate(parts)}
        return {index[ordered[s]] for s in slow}

    def depths(self, parts: Sequence[Part], *, chain: bool) -> list[int]:
        """Part -> the stages on its longest way to the end, itself included. The parts form no cycle."""
        arranged = self.arranged(parts, chain)
        assert arranged is not None, "a plan has no cycle"
        ordered, _, depth = arranged
        known = dict(zip(ordered, depth, strict=True))
        return [known[part] for part in parts]

    def _walk_parts(self, parts: Sequence[Part], b: int, chain: bool) -> tuple[Parts, tuple[list[float], list[int]]] | None:
        arranged = self.arranged(parts, chain)
        if arranged is None:
            return None
        ordered, nexts, depth = arranged
        placement = self._place(ordered, b, nexts, depth)
        return None if placement is None else (ordered, self._walk(ordered, placement, b, nexts, depth))

    def arranged(self, parts: Sequence[Part], chain: bool) -> tuple[Parts, list[list[int]], list[int]] | None:
        """The parts in stage order, the successors of each stage, and its depth; None if there is a cycle."""
        succ, order = self._edges(parts), range(len(parts))
        if chain:
            for s in range(len(parts) - 1):
                succ[s].add(s + 1)
        else:
            keys = [mask & -mask for mask, _ in parts]
            if all(keys[p] < keys[q] for p, nexts in enumerate(succ) for q in nexts):
                order = sorted(order, key=keys.__getitem__)  # the topological order by these keys
            else:
                try:
                    order = topological_order(succ, key=keys)
                except InvalidPlan:
                    return None
        position = [0] * len(parts)
        for s, p in enumerate(order):
            position[p] = s
        nexts = [[position[q] for q in succ[p]] for p in order]
        for each in nexts:
            each.sort()
        depth = [1] * len(parts)
        for s in reversed(range(len(parts))):
            for t in nexts[s]:
                if depth[t] >= depth[s]:
                    depth[s] = depth[t] + 1
        return tuple([parts[p] for p in order]), nexts, depth

    def _place(self, parts: Parts, b: int, nexts: list[list[int]], depth: list[int]) -> Placement | None:
        """The devices of every stage; None if there are not enough."""
        counts = tuple(count for _, count in parts)
        if sum(counts) > self.cluster.num_devices:
            return None
        if self._homogeneous:
            return self.placer.equal(counts)
        placer = self.placer
        seconds = [self.seconds_by_type(mask, count, b) for mask, count in parts]
        scale = self.costs.memory_scale
        needs = [self.need_bytes(mask, count, b, d, max(depth)) / scale for (mask, count), d in zip(parts, depth, strict=True)]
        return placer.unequal(counts, self._between(parts, b, nexts), seconds, needs)

    def seconds_by_type(self, mask: int, count: int, b: int) -> list[float]:
        """Seconds of both passes of a stage on each type of device; of its transfers, if they are longer and links differ."""
        out = [sum(self.stage_s(mask, b, (first,) * count)) for first in self.placer.types]
        if self.cluster.wiring.by_node is None:
            size = max(self.costs.boundary(mask)[:2]) * b / count
            out = [max(took, size / rate) for took, rate in zip(out, self.placer.mean_rates, strict=True)]
        return out

    def _between(self, parts: Parts, b: int, nexts: list[list[int]]) -> dict[tuple[int, int], float]:
        """Bytes of a micro-batch over each edge, both ways."""
        return {
            (s, t): b * sum(max(size, 0.0) for size in self._crossing(parts[s][0], parts[t][0]))
            for s in range(len(parts))
            for t in nexts[s]
        }

    def _edges(self, parts: Sequence[Part]) -> list[set[int]]:
        """Part -> the parts to which it sends."""
        owner, reads = [0] * self.graph.num_ops, []
        for p, (mask, _) in enumerate(parts):
            found = self._ops.get(mask)
            if found is None:
                inputs = 0
                for op in bits(mask):
                    inputs |= self.graph.predecessors[op]
                found = self._ops[mask] = tuple(bits(mask)), tuple(bits(inputs & ~mask))
            for op in found[0]:
                owner[op] = p
            reads.append(found[1])
        succ: list[set[int]] = [set() for _ in parts]
        for q, inputs in enumerate(reads):
            for op in inputs:
                succ[owner[op]].add(q)
        return succ

    def need_bytes(self, mask: int, count: int, b: int, distance: int, depth: int) -> float:
        """Memory of a stage on one device with the micro-batches in flight of its distance to the sink, in a plan of a depth."""
        return self.needs(mask, count, b, distance, depth)[0]

    def needs(self, mask: int, count: int, b: int, distance: int, depth: int) -> tuple[float, float]:
        """`need_bytes`, and of these what is there only while the stage computes."""
        key = (mask, count, b, distance, depth)
        found = self._needs.get(key)
        if found is not None:
            return found
        held = self._held.get((mask, b // count))
        if held is None:
            held = self._held[mask, b // count] = self.costs.held(mask, b // count)
        states = self._states.get((b, distance, depth))
        if states is None:
            holds, most = self.problem.regime.holds, self.problem.minibatch_size // b
            states = self._states[b, distance, depth] = holds.states(holds.full(distance, most), holds.late(distance, depth, most))
        found = self._needs[key] = max(held.peak(*state) for state in states), held.passing
        return found

    def _shortage(self, parts: Parts, placement: Placement, b: int, depth: list[int]) -> Shortage | None:
        short: list[tuple[float, float, float, int]] = []
        deepest = max(depth)
        for (mask, count), devices, d in zip(parts, placement, depth, strict=True):
            need = self.needs(mask, count, b, d, deepest)[0]
            if need > self.costs.limit_bytes:  # of the smallest device
                have = min(self.cluster.devices[i].memory_bytes for i in devices) * self.costs.memory_scale
                if need > have:
                    short.append((need / have, need, have, mask))
        return _worst(short)

    def _shortage_together(self, parts: Parts, placement: Placement, b: int, depth: list[int]) -> Shortage | None:
        """The bytes missing on the device that misses most, where devices hold several stages; its largest stage stands for all."""
        needs: dict[int, list[tuple[float, float, int]]] = {}
        for (mask, count), devices, d in zip(parts, placement, depth, strict=True):
            need, passing = self.needs(mask, count, b, d, max(depth))
            for device in devices:
                needs.setdefault(device, []).append((need, passing, mask))
        short: list[tuple[float, float, float, int]] = []
        for device, own in needs.items():
            need, have = (
                together((n, passing) for n, passing, _ in own),
                self.cluster.devices[device].memory_bytes * self.costs.memory_scale,
            )
            if need > have:
                short.append((need / have, need, have, max(own)[-1]))
        return _worst(short)

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

    def _crossing(self, first: int, second: int) -> tuple[float, float]:
        """Bytes per sample over an edge, forwards and backwards; what never comes back counts as minus infinity."""
        known = self._bytes.setdefault(first, {})
        if second not in known:
            tensors = self.problem.crossing(first, second)
            back = [t.bytes_per_sample for t in tensors if t.differentiable]
            known[second] = sum(self.problem.sent_bytes(t) for t in tensors), sum(back) if back or not tensors else -math.inf
        return known[second]

    def transfers_s(
        self, mask: int, senders: tuple[int, ...], readers: list[tuple[int, tuple[int, ...]]], microbatch_size: int
    ) -> list[tuple[float, float]]:
        """Shortest times of a micro-batch's largest message from a stage to others, forwards and backwards.

        An edge of data without gradients has no way back: minus infinity. Readers on the same devices may get all tensors from
        each other (`gpp.plan.carrying`): for them no bytes count.

        Args:
            readers: operators and devices of each of the others.
        """
        key = mask, senders, microbatch_size
        before = self._sent.get(key)
        if before is not None and before[0] == readers:
            return before[1]  # Most stages of a plan are those of the plan judged before it.
        known, routes, out = self._bytes.setdefault(mask, {}), self._routes.setdefault(senders, {}), []
        places = [receivers for _, receivers in readers]
        for reader, receivers in readers:
            forward, backward = known.get(reader) or self._crossing(mask, reader)
            if len(places) > 1 and places.count(receivers) > 1:
                forward, backward = 0.0, min(backward, 0.0)
            share, links = routes.get(receivers) or self._route(senders, receivers)
            samples = microbatch_size * share
            late, slow = links[0]
            ahead, back = late + forward * samples * slow, late + backward * samples * slow
            for late, slow in links[1:]:
                ahead, back = min(ahead, late + forward * samples * slow), min(back, late + backward * samples * slow)
            out.append((ahead, back))
        self._sent[key] = readers, out
        return out

    def _route(self, a: tuple[int, ...], b: tuple[int, ...]) -> tuple[float, list[tuple[float, float]]]:
        """The share of a micro-batch in the largest message, and (latency, seconds for a byte) of the links for it."""
        few, many = sorted((len(a), len(b)))
        # Replicas that do not line up share a range between two messages; the larger has half of it.
        share = 1 / many if many % few == 0 else 0.5 / many
        links = self.cluster.wiring.between(a, b)
        found = share, [(link.latency_s, 1 / link.bandwidth_bytes_per_s) for link in links]
        if self.cluster.wiring.by_node is None and not set(a).isdisjoint(b):
            found[1].append((0.0, 0.0))  # from a device to itself
        self._routes[a][b] = found
        return found

    def _walk(
        self, parts: Parts, devices: Placement, b: int, nexts: list[list[int]], depth: list[int], below_s: float = math.inf
    ) -> tuple[list[float], list[int]]:
        """Bounds on an iteration by stage, as `walk` has them, and the stage before each on its longest way."""
        where = [(mask, own) for (mask, _), own in zip(parts, devices, strict=True)]
        most, known, regime = self.problem.minibatch_size // b, self._in_flight, self.problem.regime
        held = {d: known.get((b, d)) or known.setdefault((b, d), regime.held(d, most)) for d in set(depth)}
        return walk(
            regime,
            most,
            [held[d] for d in depth],
            [self.split_s(mask, b, own) for mask, own in where],
            lambda s: self.transfers_s(*where[s], [where[t] for t in nexts[s]], b),
            lambda s: self.update_s(*where[s]),
            nexts,
            below_s,
        )

    def update_s(self, mask: int, devices: tuple[int, ...]) -> float:
        """Gradient all-reduce and the optimizer's step."""
        key = (mask, devices)
        found = self._updates.get(key)
        if found is None:
            found = self._updates[key] = finish_s(self.problem, self.costs.trainable_bytes(mask), devices)
        return found


def _worst(short: Sequence[tuple[float, float, float, int]]) -> Shortage | None:
    """The largest of some shortages: bytes needed in units of those there, both, and the operators of a stage."""
    if not short:
        return None
    _, need, have, mask = max(short)
    return Shortage(mask, need, have)


def _shared(parts: Sequence[Part], placement: Sequence[tuple[int, ...]]) -> bool:
    """Whether any device holds several parts."""
    return len({device for devices in placement for device in devices}) < sum(count for _, count in parts)
