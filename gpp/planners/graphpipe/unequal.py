"""Devices of unequal speed and memory: partitions for them, and better devices and boundaries for finished plans.

Objective: the predicted iteration time, as everywhere. What the tables of a search cannot know is which device a stage will
get. So partitions come from three views of the cluster, and only real devices judge them:
1. as if all devices were its slowest and smallest: whatever fits then fits anywhere (`StageCosts`; the ordinary search);
2. as if all were average: of the speed that adds up to the cluster's, with the least, the median and the largest memory
   (`average`), along the structure of the graph;
3. as it is, kind by kind, along lines of operators (`kind_lines`).

`settle` then improves the best plans on their own devices: all boundaries at once (`_level`), devices of two stages exchanged or
taken from the idle ones, single boundaries moved, by ascending bound while simulations gain (`_moves`).

Constraints: those of the planner that calls; a stage's slowest replica decides its time, its smallest one what it may hold.

Complexity: 2 is the ordinary search three times over; 3 see `kind_lines`; a round of `settle` bounds O(S^2 + S n) neighbours for
S stages of n operators and simulates at most `PATIENCE` in a row that gain nothing.

Departures: the paper has no unequal devices.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import final

import numpy as np

from gpp.cluster import Cluster, Device
from gpp.cost.models.base import AbstractCostModel, OpTimes
from gpp.cost.problem import Problem
from gpp.graph.op_graph import OpGraph, mask_of
from gpp.graph.series_parallel import Order
from gpp.plan.plan import Plan
from gpp.planners.common.candidates import Assessor, Candidate, Search, Shortage
from gpp.planners.common.linear_orders import Intervals
from gpp.planners.common.placement import Placement
from gpp.planners.common.stage_costs import StageCosts
from gpp.planners.graphpipe.candidate_partitions import drafts
from gpp.planners.graphpipe.heterogeneous_chain import KindLine
from gpp.planners.graphpipe.partition_search import PartitionSearch
from gpp.planners.graphpipe.refine import adjacent, boundary_moves, refine, repair
from gpp.planners.graphpipe.sp_structure import SPStructure

DEPTH_SCALES = (0.25, 0.5, 0.75, 1.0)
"""Depths of a line that memory is reckoned with, in units of its stages."""

LAYOUTS = 16
"""Of each line, judged with their own kinds and with the placer's."""

REPAIRS = 2
"""Drafts that lack memory and are changed until they fit, for each view."""

PATIENCE = 6
"""Simulations without a better plan that end a step."""

SETTLED = 3
"""Micro-batch sizes whose best plans are settled."""

MOST_ROUNDS = 12
"""Of `settle`, for each plan."""

ALL_STAGES = 10
"""Plans of at most so many stages are changed everywhere, larger ones at the stages that hold them up."""

HOT = 0.9
"""Share of the largest bound from which on a stage counts as one of these."""

WINDOW, POWER = 16, 8.0
"""Operators by which `_level` moves a boundary to either side, and the power of the stages' times that it sums up."""


@final
@dataclass(frozen=True, slots=True)
class _Average(AbstractCostModel):
    """Times of an average device: the harmonic mean over the cluster's, so that equal devices would get as much done."""

    problem: Problem

    def op_times(self, graph: OpGraph, samples: int, device: Device) -> OpTimes:
        firsts = self.problem.type_of_device
        each = [self.problem.op_times(samples, first) for first in firsts]

        def mean(rows: list[np.ndarray]) -> np.ndarray:
            with np.errstate(divide="ignore"):
                return len(rows) / (1 / np.array(rows)).sum(axis=0)

        return OpTimes(forward_s=mean([t.forward_s for t in each]), backward_s=mean([t.backward_s for t in each]))

    def update_s(self, num_bytes: float, device: Device) -> float:
        return _mean([self.problem.cost.update_s(num_bytes, d) for d in self.problem.cluster.devices])

    def move_s(self, num_bytes: float, device: Device) -> float:
        return _mean([self.problem.cost.move_s(num_bytes, d) for d in self.problem.cluster.devices])


def _mean(each: list[float]) -> float:
    """Harmonic mean of times: that of speeds."""
    return len(each) / sum(1 / s for s in each) if all(each) else 0.0


def average(problem: Problem) -> list[Problem]:
    """The problem on equal, average devices, with the least, the median and the largest memory."""
    cluster = problem.cluster
    memory = sorted(device.memory_bytes for device in cluster.devices)
    out = []
    for level in sorted({memory[0], memory[len(memory) // 2], memory[-1]}):
        devices = (replace(cluster.devices[0], memory_bytes=level),) * len(memory)
        out.append(replace(problem, cluster=replace(cluster, devices=devices), cost=_Average(problem)))
    return out


def draft_unequal(search: Search, orders: Sequence[Order], lines: Sequence[tuple[int, ...]]) -> None:
    """Simulate partitions for average devices along the structure, and for each kind of device along lines."""
    assessor = search.assessor
    views = [StageCosts(problem, replication=assessor.costs.replication) for problem in average(assessor.problem)]
    for costs in views:
        for order in orders:
            found = drafts(PartitionSearch(SPStructure(costs, order)), assessor, search.best_s)
            search.simulate_all(found.fitting, PATIENCE)
            for _, stages, b in found.lacking[:REPAIRS]:
                repair(search, stages, b)
    if not KindLine.affordable(assessor.placer):
        return
    for line in lines:
        for scale in DEPTH_SCALES:
            lacking, found = [], []
            for layout in KindLine(views[0], assessor.problem, assessor.placer, line, depth_scale=scale).layouts()[:LAYOUTS]:
                tried = [assessor.assess(layout.parts, layout.microbatch_size, kinds=kinds) for kinds in (layout.kinds, None)]
                fitting = [candidate for candidate in tried if isinstance(candidate, Candidate)]
                found += fitting
                lacking += [layout] * (not fitting)
            search.simulate_all(found, PATIENCE)
            for layout in lacking[:REPAIRS]:
                repair(search, list(layout.parts), layout.microbatch_size)
            if not lacking:
                break


def everywhere(
    assessor: Assessor, parts: Sequence[tuple[int, int]], microbatch_size: int, chain: bool
) -> Iterator[Candidate | Shortage | None]:
    """A partition's verdicts on all devices that differ in more than their names; on equal devices the placer's alone."""
    if assessor.cluster.homogeneous:
        yield assessor.assess(parts, microbatch_size, chain=chain)
        return
    classes: dict[tuple[int, int], list[int]] = {}
    for device, kind in enumerate(assessor.placer.kind_of):
        classes.setdefault((kind, assessor.cluster.nodes[device]), []).append(device)
    members = list(classes.values())

    def deal(taken: tuple[int, ...], placed: Placement) -> Iterator[Placement]:
        if len(placed) == len(parts):
            yield placed
            return
        for chosen in _selections(parts[len(placed)][1], [len(m) - t for m, t in zip(members, taken, strict=True)]):
            devices = sorted(d for m, t, n in zip(members, taken, chosen, strict=True) for d in m[t : t + n])
            yield from deal(tuple(t + n for t, n in zip(taken, chosen, strict=True)), (*placed, tuple(devices)))

    for placed in deal((0,) * len(members), ()):
        yield assessor.assess(parts, microbatch_size, chain=chain, placement=placed)


def _selections(count: int, room: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """How many of each class, `count` in all."""
    if not room:
        if not count:
            yield ()
        return
    for n in range(min(count, room[0]), -1, -1):
        for rest in _selections(count - n, room[1:]):
            yield (n, *rest)


def settle(search: Search) -> None:
    """Improve the best plans on their own devices; then by steps that deal the devices out anew, and on those once more."""
    for plan, seconds in search.best_by_size()[:SETTLED]:
        _settle(search, plan, seconds)
    refine(search, PATIENCE)
    for plan, seconds in search.best_by_size()[:1]:
        _settle(search, plan, seconds)


def _settle(search: Search, plan: Plan, seconds: float) -> None:
    for _ in range(MOST_ROUNDS):
        before = seconds
        candidates = sorted(_moves(search, plan, seconds))
        leveled = _level(search, plan)
        if leveled is not None and leveled.bound_s < seconds:
            candidates.insert(0, leveled)
        left = PATIENCE
        for candidate in candidates:
            if not left or candidate.bound_s >= seconds:
                break
            found = search.simulate(candidate, below_s=seconds)
            if found is None:
                continue
            left -= 1
            if found[1] < seconds:
                (plan, seconds), left = found, PATIENCE
        if seconds >= before:
            break


def _is_chain(search: Search, plan: Plan) -> bool:
    return any(not tensors for tensors in plan.edge_tensors(search.assessor.graph).values())


def _moves(search: Search, plan: Plan, seconds: float) -> set[Candidate]:
    """Plans one step away whose bounds are below `seconds`."""
    assessor, chain = search.assessor, _is_chain(search, plan)
    b = plan.stages[0].microbatch_size
    parts = [(mask_of(stage.ops), len(stage.devices)) for stage in plan.stages]
    devices = [stage.devices for stage in plan.stages]
    hot = set(range(len(parts)))
    if len(parts) > ALL_STAGES:
        hot = assessor.slow_parts(parts, b, HOT, chain=chain)
    out = set()

    def consider(parts: Sequence[tuple[int, int]], devices: Sequence[tuple[int, ...]] | None) -> None:
        found = assessor.assess(parts, b, chain=chain, placement=devices)
        if isinstance(found, Candidate) and found.bound_s < seconds:
            out.add(found)

    for placed in _exchanges(search, devices, hot):
        consider(parts, placed)
    consider(parts, None)
    allowed = assessor.costs.replicas[b]
    idle = sorted(set(range(assessor.cluster.num_devices)).difference(*devices))
    for s in sorted(hot):
        for r in (x for x in allowed if x != parts[s][1] and x <= parts[s][1] + len(idle)):
            changed = [*parts[:s], (parts[s][0], r), *parts[s + 1 :]]
            for own in _resized(search, devices[s], idle, r):
                consider(changed, [*devices[:s], own, *devices[s + 1 :]])
            consider(changed, None)
    for p, q in adjacent(assessor.graph, parts, chain):
        if p in hot or q in hot:
            for moved in boundary_moves(assessor.graph, parts, p, q):
                consider(moved, devices)
                consider(moved, None)
    return out


def _resized(search: Search, own: tuple[int, ...], idle: list[int], count: int) -> list[tuple[int, ...]]:
    """A stage's devices, some more idle ones or the fastest and the largest of them."""
    cluster = search.assessor.cluster
    pool = [*own, *idle] if count > len(own) else list(own)
    fast = sorted(pool, key=lambda d: (-cluster.devices[d].speed_factor * _rate(cluster, d), d not in own, d))[:count]
    large = sorted(pool, key=lambda d: (-cluster.devices[d].memory_bytes, d not in own, d))[:count]
    near = sorted(pool, key=lambda d: (d not in own, cluster.nodes[d] != cluster.nodes[own[0]], d))[:count]
    return list(dict.fromkeys(tuple(sorted(some)) for some in (fast, large, near)))


def _rate(cluster: Cluster, device: int) -> float:
    return max(cluster.devices[device].peak_flop_per_s.values())


def _exchanges(search: Search, devices: list[tuple[int, ...]], hot: set[int]) -> Iterator[list[tuple[int, ...]]]:
    """Two stages' devices exchanged, all or one by one; one device for an idle one. Only where kinds or nodes differ."""
    placer, nodes = search.assessor.placer, search.assessor.cluster.nodes

    def label(d: int) -> tuple[int, int]:
        return placer.kind_of[d], nodes[d]

    def with_devices(changes: dict[int, tuple[int, ...]]) -> list[tuple[int, ...]]:
        return [tuple(sorted(changes.get(s, own))) for s, own in enumerate(devices)]

    idle = sorted(set(range(len(nodes))).difference(*devices))
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


def _level(search: Search, plan: Plan) -> Candidate | None:
    """All boundaries at their best places on the plan's own devices: the stages, one after the other, are a line of operators.

    A dynamic program picks every boundary within a window so that the sum of high powers of the stages' times is least.
    """
    assessor = search.assessor
    costs, problem, cluster = assessor.costs, assessor.problem, assessor.cluster
    line = tuple(op for stage in plan.stages for op in stage.ops)
    if len(plan.stages) < 2:
        return None
    b = plan.stages[0].microbatch_size
    ends = np.cumsum([len(stage.ops) for stage in plan.stages]).tolist()
    places = [np.array([0])]
    places += [np.arange(max(end - WINDOW, 1), min(end + WINDOW, len(line) - 1) + 1) for end in ends[:-1]]
    places.append(np.array([ends[-1]]))
    table = Intervals(costs, line)
    scale = max(sum(problem.stage_times(stage.ops, b, stage.devices)) for stage in plan.stages) or 1.0
    value, choices = np.zeros(1), []
    for s, stage in enumerate(plan.stages):
        i, j = places[s][:, None], places[s + 1][None, :]
        samples = b // len(stage.devices)
        seconds = np.zeros((len(places[s]), len(places[s + 1])))
        for kind in {problem.type_of_device[d] for d in stage.devices}:
            times = problem.op_times(samples, kind)
            prefix = np.concatenate([[0.0], np.cumsum((times.forward_s + times.backward_s)[list(line)])])
            seconds = np.maximum(seconds, prefix[j] - prefix[i])
        held = stage.in_flight // b
        need = table.held((i, j), samples).peak(held)
        have = min(cluster.devices[d].memory_bytes for d in stage.devices)
        total = value[:, None] + np.where((need <= have) & (j > i), (seconds / scale) ** POWER, np.inf)
        choices.append(total.argmin(axis=0))
        value = total.min(axis=0)
    if not math.isfinite(value[0]):
        return None
    at, cuts = 0, [len(line)]
    for s in range(len(plan.stages) - 1, -1, -1):
        at = int(choices[s][at])
        cuts.append(int(places[s][at]))
    cuts.reverse()
    parts = [(mask_of(line[cuts[s] : cuts[s + 1]]), len(stage.devices)) for s, stage in enumerate(plan.stages)]
    placed = [stage.devices for stage in plan.stages]
    found = assessor.assess(parts, b, chain=_is_chain(search, plan), placement=placed)
    return found if isinstance(found, Candidate) else None
