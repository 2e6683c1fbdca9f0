"""Finished candidates: a lower bound on their iteration time, and the best one so far.

The bound holds for synchronous schedules that keep no more than the plan's samples in flight and do a
whole backward at a time (GPipe, 1F1B). Under other schedules it only decides which candidates are
worth a simulation; what wins is always the best prediction.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from gpp.cost.stage import finish_s
from gpp.errors import InvalidPlan
from gpp.graph.op_graph import bits
from gpp.plan.build import make_plan, topological_order
from gpp.plan.plan import Plan
from gpp.planners.base import Predict
from gpp.planners.common.placement import Kinds, Placement, Placer
from gpp.planners.common.stage_costs import StageCosts

Parts = tuple[tuple[int, int], ...]
"""(operator mask, number of devices) for each stage, in stage order."""

MARGIN = 1 - 1e-9
"""A candidate must be better than the best by more than rounding."""


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
    """The stage of a candidate that lacks most memory, in units of its device's memory.

    Args:
        lacking: masks of all stages that lack memory; total: what they lack together, in these units.
    """

    mask: int
    need_bytes: float
    have_bytes: float
    lacking: tuple[int, ...] = ()
    total: float = 0.0

    @property
    def scale(self) -> float:
        return self.need_bytes / self.have_bytes


class Assessor:
    """Puts partitions into stage order, checks their memory on the devices that they will get, bounds their time."""

    def __init__(self, costs: StageCosts) -> None:
        self.costs, self.problem, self.graph, self.cluster = costs, costs.problem, costs.graph, costs.cluster
        self._homogeneous = costs.cluster.homogeneous
        self._inputs: dict[int, int] = {}
        self._times: dict[tuple[int, int, int, object], tuple[float, float]] = {}
        self._bytes: dict[tuple[int, int], tuple[float, float]] = {}
        self._updates: dict[tuple[int, tuple[int, ...]], float] = {}
        self._routes: dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[float, list[tuple[float, float]]]] = {}
        self.placer = Placer(costs.cluster)

    def assess(
        self,
        parts: Sequence[tuple[int, int]],
        microbatch_size: int,
        *,
        chain: bool = False,
        placement: Sequence[tuple[int, ...]] | None = None,
        kinds: Sequence[Kinds] | None = None,
    ) -> Candidate | Shortage | None:
        """A candidate; what it lacks, if it does not fit; None if its stages form a cycle or there are too few devices.

        Args:
            parts: in any order, or for a chain in the chain's order.
            placement: devices of each part; kinds: what kind of devices each part gets; None for the placer's choice.
        """
        arranged = self._arranged(parts, chain)
        if arranged is None:
            return None
        ordered, nexts, depth = arranged
        if placement is not None:
            given = {mask: devices for (mask, _), devices in zip(parts, placement, strict=True)}
            placed: Placement | None = tuple(given[mask] for mask, _ in ordered)
        elif kinds is not None:
            asked = {mask: kind for (mask, _), kind in zip(parts, kinds, strict=True)}
            placed = self.placer.near([asked[mask] for mask, _ in ordered], self._between(ordered, microbatch_size, nexts))
        else:
            placed = self._place(ordered, microbatch_size, nexts, depth)
        if placed is None:
            return None
        placement = placed
        return self._shortage(ordered, placement, microbatch_size, depth) or Candidate(
            max(self._walk(ordered, placement, microbatch_size, nexts, depth)[0]),
            max(depth),
            microbatch_size,
            chain,
            ordered,
            placement,
        )

    def slow_parts(self, parts: Sequence[tuple[int, int]], microbatch_size: int, share: float, *, chain: bool) -> set[int]:
        """Parts of a candidate, in the given order, that hold the iteration up.

        Those that alone keep it at `share` of its bound or more, and those on the way to the slowest one and back.
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
        index = {part: i for i, part in enumerate(parts)}
        return {index[ordered[s]] for s in slow}

    def stage_bounds_s(self, parts: Sequence[tuple[int, int]], microbatch_size: int) -> list[float] | None:
        """What every stage alone bounds the iteration by, in stage order; None if there is a cycle or a lack of devices."""
        walked = self._walk_parts(parts, microbatch_size, False)
        return walked and walked[1][0]

    def _walk_parts(
        self, parts: Sequence[tuple[int, int]], b: int, chain: bool
    ) -> tuple[Parts, tuple[list[float], list[int]]] | None:
        arranged = self._arranged(parts, chain)
        if arranged is None:
            return None
        ordered, nexts, depth = arranged
        placement = self._place(ordered, b, nexts, depth)
        return None if placement is None else (ordered, self._walk(ordered, placement, b, nexts, depth))

    def _arranged(self, parts: Sequence[tuple[int, int]], chain: bool) -> tuple[Parts, list[list[int]], list[int]] | None:
        """The parts in stage order, the successors of each stage, and its depth; None if there is a cycle."""
        edges = self._edges(parts)
        if chain:
            order = list(range(len(parts)))
        else:
            succ: list[set[int]] = [set() for _ in parts]
            for a, b in edges:
                succ[a].add(b)
            try:
                order = topological_order(succ, key=[(mask & -mask).bit_length() for mask, _ in parts])
            except InvalidPlan:
                return None
        ordered = tuple(parts[p] for p in order)
        position = {p: s for s, p in enumerate(order)}
        nexts: list[list[int]] = [[] for _ in parts]
        for a, b in edges:
            nexts[position[a]].append(position[b])
        if chain:
            for s in range(len(parts) - 1):
                if s + 1 not in nexts[s]:
                    nexts[s].append(s + 1)
        depth = [1] * len(parts)
        for s in reversed(range(len(parts))):
            depth[s] += max((depth[t] for t in nexts[s]), default=0)
        return ordered, nexts, depth

    def _place(self, parts: Parts, b: int, nexts: list[list[int]], depth: list[int]) -> Placement | None:
        """Devices of every stage; None if there are not enough."""
        counts = tuple(count for _, count in parts)
        if sum(counts) > self.cluster.num_devices:
            return None
        if self._homogeneous:
            return self.placer.equal(counts)
        placer = self.placer
        seconds = [[sum(self._stage_s(mask, b, (kind,) * count)) for kind in placer.kinds] for mask, count in parts]
        scale = self.costs.memory_scale
        needs = [self._need_bytes(mask, count, b, d) / scale for (mask, count), d in zip(parts, depth, strict=True)]
        return placer.unequal(counts, self._between(parts, b, nexts), seconds, needs)

    def _between(self, parts: Parts, b: int, nexts: list[list[int]]) -> dict[tuple[int, int], float]:
        """Bytes of a micro-batch over each edge, both ways."""
        return {
            (s, t): b * sum(max(size, 0.0) for size in self._crossing(parts[s][0], parts[t][0]))
            for s in range(len(parts))
            for t in nexts[s]
        }

    def _edges(self, parts: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        edges = []
        for q, (mask, _) in enumerate(parts):
            inputs = self._inputs.get(mask)
            if inputs is None:
                inputs = 0
                for op in bits(mask):
                    inputs |= self.graph.predecessors[op]
                inputs = self._inputs[mask] = inputs & ~mask
            edges += [(p, q) for p, (other, _) in enumerate(parts) if inputs & other]
        return edges

    def _need_bytes(self, mask: int, count: int, b: int, depth: int) -> float:
        """Memory of a stage on one device with the depth's micro-batches in flight."""
        return self.costs.held(mask, b // count).peak(self.problem.regime.held(depth, self.problem.minibatch_size // b))

    def _shortage(self, parts: Parts, placement: Placement, b: int, depth: list[int]) -> Shortage | None:
        short: list[tuple[float, float, float, int]] = []
        for (mask, count), devices, d in zip(parts, placement, depth, strict=True):
            need = self._need_bytes(mask, count, b, d)
            if need > self.costs.limit_bytes:  # of the smallest device
                have = min(self.cluster.devices[i].memory_bytes for i in devices) * self.costs.memory_scale
                if need > have:
                    short.append((need / have, need, have, mask))
        if not short:
            return None
        _, need, have, mask = max(short)
        return Shortage(mask, need, have, tuple(mask for *_, mask in short), sum(scale - 1 for scale, *_ in short))

    def _stage_s(self, mask: int, b: int, devices: tuple[int, ...]) -> tuple[float, float]:
        key = (mask, b, len(devices), None if self._homogeneous else devices)
        if key not in self._times:
            self._times[key] = self.problem.stage_times(tuple(bits(mask)), b, devices)
        return self._times[key]

    def _crossing(self, first: int, second: int) -> tuple[float, float]:
        """Bytes per sample over an edge, forwards and backwards; what never comes back counts as minus infinity."""
        key = (first, second)
        if key not in self._bytes:
            tensors = self.problem.crossing(*key)
            back = [t.bytes_per_sample for t in tensors if t.differentiable]
            returns = bool(back) if tensors else self._differentiates(first) and self._differentiates(second)
            self._bytes[key] = sum(t.bytes_per_sample for t in tensors), sum(back) if returns else -math.inf
        return self._bytes[key]

    def _differentiates(self, mask: int) -> bool:
        return self.graph.differentiated == self.graph.all_mask or bool(mask & self.graph.differentiated)

    def _transfers_s(
        self, a: tuple[int, tuple[int, ...]], b: tuple[int, tuple[int, ...]], microbatch_size: int
    ) -> tuple[float, float]:
        """Shortest times of a micro-batch's largest message over an edge, forwards and backwards.

        An edge of data without gradients has no way back: minus infinity.
        """
        forward, backward = self._crossing(a[0], b[0])
        key = (a[1], b[1])
        found = self._routes.get(key)
        if found is None:
            found = self._routes[key] = self._route(*key)
        share, links = found
        samples = microbatch_size * share
        if len(links) == 1:
            late, slow = links[0]
            return late + forward * samples * slow, late + backward * samples * slow
        return (
            min(late + forward * samples * slow for late, slow in links),
            min(late + backward * samples * slow for late, slow in links),
        )

    def _route(self, a: tuple[int, ...], b: tuple[int, ...]) -> tuple[float, list[tuple[float, float]]]:
        """The share of a micro-batch in the largest message, and (latency, seconds for a byte) of the links that it may take."""
        few, many = sorted((len(a), len(b)))
        # Replicas that do not line up share a range between two messages; the larger has half of it.
        share = 1 / many if many % few == 0 else 0.5 / many
        nodes = self.cluster.nodes
        links = [self.cluster.intra_node] if {nodes[i] for i in a} & {nodes[i] for i in b} else []
        links += [self.cluster.inter_node] if len({nodes[i] for i in (*a, *b)}) > 1 else []
        return share, [(link.latency_s, 1 / link.bandwidth_bytes_per_s) for link in links]

    def _walk(
        self, parts: Parts, devices: Placement, b: int, nexts: list[list[int]], depth: list[int]
    ) -> tuple[list[float], list[int]]:
        """No iteration is shorter than any of these, by stage: its micro-batches, and its update or the way to it and back.

        Micro-batches take their compute time, or as many round trips to the farthest sink as the samples in flight force one after
        the other. A way there and back ends with the update of the stage where it begins, whose next step waits for both
        (`gpp.simulate.period`). In a pipeline that does not drain there are no ways, and an update holds its stage up every time.

        Also the stage before each on its longest way; -1 at its end.
        """
        problem, count = self.problem, len(parts)
        num_microbatches = problem.minibatch_size // b
        times = [self._stage_s(mask, b, devices[s]) for s, (mask, _) in enumerate(parts)]
        moves = [
            [self._transfers_s((parts[s][0], devices[s]), (parts[t][0], devices[t]), b) for t in nexts[s]] for s in range(count)
        ]
        trip, way, came_from = [sum(pair) for pair in times], [0.0] * count, [-1] * count
        for s in reversed(range(count)):
            longest = 0.0
            for t, (ahead, back) in zip(nexts[s], moves[s], strict=True):
                longest = max(longest, trip[t] + ahead + back)
            trip[s] += longest
        bounds = []
        for s in range(count):
            in_flight = problem.regime.held(depth[s], num_microbatches)
            forward, backward = times[s]
            busy, update = num_microbatches * (forward + backward), self._update_s(parts[s][0], devices[s])
            if problem.regime.minibatches == 1:
                trips = -(-num_microbatches // in_flight) * trip[s]
                bounds.append(max(way[s], update) + max(busy, trips))
            else:
                bounds.append(max(busy + problem.regime.minibatches * update, num_microbatches / in_flight * trip[s]))
            for t, (ahead, back) in zip(nexts[s], moves[s], strict=True):
                around = max(way[s], update) + forward + ahead + back + backward
                if around > way[t]:
                    way[t], came_from[t] = around, s
        return bounds, came_from

    def _update_s(self, mask: int, devices: tuple[int, ...]) -> float:
        """Gradient all-reduce and the optimizer's step."""
        key = (mask, devices)
        found = self._updates.get(key)
        if found is None:
            found = self._updates[key] = finish_s(self.problem, self.costs.trainable_bytes(mask), devices)
        return found


class Search:
    """The best plan so far, by predicted iteration time; ties go to the one that was tried first."""

    def __init__(self, assessor: Assessor, planner: str, predict: Predict) -> None:
        self.assessor, self.planner, self.predict = assessor, planner, predict
        self.best: Plan | None = None
        self.best_s = float("inf")
        self.num_simulated = 0
        self._seen: set[tuple[int, bool, Parts, Placement]] = set()
        self._by_size: dict[int, tuple[Plan, float]] = {}

    def worth(self, bound_s: float) -> bool:
        """Whether something that takes `bound_s` at least could still win."""
        return bound_s < self.best_s * MARGIN

    def simulate(self, candidate: Candidate, *, below_s: float | None = None) -> tuple[Plan, float] | None:
        """A candidate's plan and predicted seconds; None if it cannot win, or was tried before.

        Args:
            below_s: what it has to beat; None for the best plan.
        """
        key = (candidate.microbatch_size, candidate.chain, candidate.parts, candidate.placement)
        beat = self.best_s if below_s is None else below_s
        if candidate.bound_s >= beat * MARGIN or key in self._seen:
            return None
        self._seen.add(key)
        plan = make_plan(
            self.assessor.problem,
            self.planner,
            candidate.parts,
            candidate.microbatch_size,
            chain=candidate.chain,
            ordered=True,
            placement=candidate.placement,
        )
        seconds = self.predict(plan).metrics.iteration_s
        self.num_simulated += 1
        b = candidate.microbatch_size
        if b not in self._by_size or seconds < self._by_size[b][1] * MARGIN:
            self._by_size[b] = plan, seconds
        if seconds < self.best_s * MARGIN:
            self.best, self.best_s = plan, seconds
        return plan, seconds

    def offer(self, plan: Plan) -> None:
        """Keep another planner's plan if it is the best."""
        seconds = self.predict(plan).metrics.iteration_s
        if seconds < self.best_s * MARGIN:
            self.best, self.best_s = replace(plan, planner=self.planner, explanation=()), seconds

    def best_by_size(self) -> list[tuple[Plan, float]]:
        """The best plan of each micro-batch size and its seconds, best first."""
        return [self._by_size[b] for b in sorted(self._by_size, key=lambda b: (self._by_size[b][1], b))]

    def simulate_all(self, candidates: Sequence[Candidate], limit: int | None = None) -> None:
        """Simulate candidates by ascending bound until none can win.

        Args:
            limit: end after so many simulations without a better plan; None for no end.
        """
        left = limit
        for candidate in sorted(candidates):
            if not self.worth(candidate.bound_s) or left == 0:
                break
            before = self.best_s
            if self.simulate(candidate) is not None and left is not None:
                left = limit if self.best_s < before else left - 1
