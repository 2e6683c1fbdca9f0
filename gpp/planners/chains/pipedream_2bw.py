"""PipeDream-2BW's planner: depth and width of a pipeline of equal stages, by trying all (Narayanan et al., ICML '21).

Objective (reported in the plan's explanation): seconds of a mini-batch of m micro-batches of b samples, b / w for each of w
replicas,

    m t,   t = max over the stages of max(compute(b / w) + bytes in (b / w) / bandwidth,   all-reduce over w devices / m)

with the bytes per sample that come into a stage and go back for them. A pipeline that drains takes (m + d - 1) t. For every depth
d, width w and b the chain is cut so that t is least. The best of every width, then the best of all, `max_candidates` together, are
predicted, and the best prediction wins. Of equal objectives the larger b comes first.

Constraints:
1. d w is at most the number of devices; every stage has w replicas; w divides b: `_ShapeSearch.shapes`.
2. m is at least d where the weight policy needs it: `Problem.microbatch_sizes`.
3. Memory: the stage at position p from the end keeps p micro-batches, and the policy's versions of the weights: `_Cutter._needs`.
4. Stages are intervals of the depth-first order, or of the one by inputs (`common.linear_orders`); they run as a chain.

Complexity: O(D log D n^2) numpy operations for each b, with D devices and n operators; more by a factor of D at most where a
stage's versions depend on the whole depth.

Departures:
* the paper's model is a chain of equal blocks, of which every stage gets as many. Ours is any graph: the cut whose slowest stage is
  fastest takes the place of equal counts, among those that fit (the paper discards a shape whose even cut does not);
* the largest micro-batch that fits is preferred among equals only: all sizes are tried, and throughput decides;
* what is recomputed is the memory policy's choice: with selection=all every operator of a stage that lacks memory,
  as published, which keeps the input of its first operator only;
* the prediction decides between the best objectives, which let all-reduces and transfers overlap with compute or add them up, as
  the paper does; memory is this project's: gradients, optimizer state and boundaries count;
* bandwidth between stages is that inside a node where all devices used are in one, else that between nodes; the all-reduce is
  that of the stage whose devices lie worst.
A heterogeneous cluster is searched as if all devices were its slowest and smallest.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple, final

import numpy as np

from gpp.cost.amounts import Amounts
from gpp.cost.problem import Problem
from gpp.plan.plan import Objective, Plan
from gpp.planners.base import AbstractPlanner, Predict
from gpp.planners.chains.chain_tables import Part, Seconds, chain_plan
from gpp.planners.common.candidates import Candidate
from gpp.planners.common.incumbent import MARGIN
from gpp.planners.common.infeasible import explain
from gpp.planners.common.linear_orders import Intervals, branch_first_order, depth_first_order, intervals
from gpp.planners.common.placement import Placement, Placer
from gpp.planners.common.stage_costs import StageCosts
from gpp.settings import Count, settings
from gpp.weights.base import PipelinePosition

ROUNDING = 1 + 1e-9
"""A stage that fits exactly must not be lost to the tables' rounding: finished plans are checked again."""


@final
@settings("strategy.planner")
class PipeDream2BW(AbstractPlanner):
    """The exhaustive search over depth, width and micro-batch size.

    Args:
        replication: whether stages may be replicated; else the width is 1.
        max_candidates: shapes that are predicted.
    """

    replication: bool = True
    max_candidates: Count = 16

    def plan(self, problem: Problem, predict: Predict) -> Plan:
        search = _ShapeSearch(problem, self)
        found = sorted(search.found(), key=_Found.rank)
        best, best_s, tried = None, float("inf"), 0
        for each in _one_of_each_width_first(found):
            if tried == self.max_candidates:
                break
            plan = search.plan_of(each)
            if plan is not None:
                tried += 1
                seconds = predict(plan).metrics.iteration_s
                if seconds < best_s * MARGIN:
                    best, best_s = (each, plan), seconds
        if best is None:
            raise explain(problem, self._attempt)
        (chosen, plan), (depth, width, b) = best, best[0].shape
        objective = Objective(value_s=chosen.value_s, scope="a mini-batch")
        lines = (
            f"own objective: {objective}; depth {depth}, width {width}, micro-batch {b} ({problem.accumulation(b)} a mini-batch)",
            f"{len(found)} of {search.num_shapes} shapes (depth, width, micro-batch) fit; best prediction of the {tried} best",
        )
        return replace(plan, objective=objective, explanation=lines)

    def _attempt(self, problem: Problem) -> Candidate | None:
        search = _ShapeSearch(problem, self)
        return next((search.example(each) for each in search.found()), None)


class _Shape(NamedTuple):
    depth: int
    width: int
    microbatch_size: int


class _Found(NamedTuple):
    """A shape that fits, and its cut: seconds of a mini-batch, operators of every stage."""

    value_s: float
    shape: _Shape
    masks: tuple[int, ...]

    def rank(self) -> tuple[float, int, _Shape]:
        # Rounding must not decide between equal objectives.
        return float(f"{self.value_s:.9g}"), -self.shape.microbatch_size, self.shape


def _one_of_each_width_first(found: list[_Found]) -> list[_Found]:
    """The best of every width, then the others: what an objective without overlap gets wrong depends on the width above all."""
    first: dict[int, _Found] = {}
    for each in found:
        first.setdefault(each.shape.width, each)
    chosen = list(first.values())
    return chosen + [each for each in found if each not in chosen]


class _ShapeSearch:
    """All shapes of one problem, each with its best cut."""

    def __init__(self, problem: Problem, settings: PipeDream2BW) -> None:
        self.problem, self.settings = problem, settings
        self.limit = problem.memory_limit_bytes * ROUNDING
        self.placer, self.seconds = Placer(problem.cluster), Seconds(problem)
        costs, graph = StageCosts(problem), problem.graph
        orders = dict.fromkeys((depth_first_order(graph), branch_first_order(graph)))
        self.tables = [intervals(costs, order) for order in orders]
        self.num_shapes = 0

    def shapes(self) -> Iterator[_Shape]:
        """Every depth, width and micro-batch size that the devices and the weight policy allow."""
        problem, devices = self.problem, self.problem.cluster.num_devices
        widest = min(devices, problem.max_replicas or devices) if self.settings.replication else 1
        for width in range(1, widest + 1):
            for depth in range(1, min(devices // width, problem.graph.num_ops) + 1):
                for b in problem.microbatch_sizes(depth):
                    if b % width == 0 and problem.accumulation(b) >= problem.regime.weights.least_accumulation(depth):
                        yield _Shape(depth, width, b)

    def found(self) -> Iterator[_Found]:
        """The best cut of every shape, where one fits."""
        cutters: dict[tuple[int, int, int, float, int], _Cutter] = {}
        for shape in self.shapes():
            self.num_shapes += 1
            placement = self.placer.equal((shape.width,) * shape.depth)
            bandwidth, worst = self._bandwidth(placement), self._worst(placement)
            best: tuple[float, tuple[int, ...]] | None = None
            for at, table in enumerate(self.tables):
                key = (at, *shape[1:], bandwidth, worst[0])
                if key not in cutters:
                    cutters[key] = _Cutter(self, table, shape, bandwidth, worst)
                value_s, cuts = cutters[key].best(shape.depth)
                if cuts is not None and (best is None or value_s < best[0] * MARGIN):
                    best = value_s, tuple(table.mask(i, j) for i, j in cuts)
            if best is not None:
                m = self.problem.accumulation(shape.microbatch_size)
                slots = m + shape.depth - 1 if self.problem.regime.weights.flushes else m
                yield _Found(slots * best[0], shape, best[1])

    def _bandwidth(self, placement: Placement) -> float:
        cluster = self.problem.cluster
        one_node = len({cluster.nodes[d] for devices in placement for d in devices}) == 1
        inside, across = cluster.wiring.means
        return (inside if one_node else across).bandwidth_bytes_per_s

    def _worst(self, placement: Placement) -> tuple[int, ...]:
        """The stage's devices whose all-reduce takes longest, by the nodes that they are in."""
        return max(placement, key=lambda devices: (self.problem.cluster.allreduce_s(1e6, devices), -devices[0]))

    def plan_of(self, found: _Found) -> Plan | None:
        """Its plan; None if it does not fit after all."""
        problem, shape = self.problem, found.shape
        placement = self.placer.equal((shape.width,) * shape.depth)
        parts = [Part(mask, shape.width, devices=devices) for mask, devices in zip(found.masks, placement, strict=True)]
        plan = chain_plan(problem, "pipedream_2bw", parts, shape.microbatch_size)
        needs = plan.device_memory(problem, {s: stage.in_flight for s, stage in enumerate(plan.stages)})
        return plan if all(need <= problem.cluster.devices[d].memory_bytes for d, need in needs.items()) else None

    def example(self, found: _Found) -> Candidate:
        """As an example of what fits."""
        shape = found.shape
        parts = tuple((mask, shape.width) for mask in found.masks)
        placement = self.placer.equal((shape.width,) * shape.depth)
        return Candidate(found.value_s, shape.depth, shape.microbatch_size, True, parts, placement)

    def seconds_of(self, table: Intervals, samples: int) -> np.ndarray:
        """Seconds of every interval: [n + 1, n + 1]."""
        forward, backward = self.seconds.of(samples)
        return _between((forward + backward)[list(table.order)])

    def amounts_of(self, table: Intervals) -> Amounts:
        """The parts of every interval's bytes: arrays of shape [n + 1, n + 1]."""
        graph, amounts = self.problem.graph, table.amounts
        differentiated = _between(np.array([graph.differentiated >> op & 1 for op in table.order], dtype=float)) > 0
        # Without a backward pass nothing is in flight, as in `Problem.amounts`.
        kept, once = (
            np.where(differentiated, amounts.kept, 0.0),
            np.where(differentiated, amounts.once, amounts.kept + amounts.once),
        )
        return amounts._replace(kept=kept, once=once)


def _between(values: np.ndarray) -> np.ndarray:
    """[n + 1, n + 1] sums of the values from i up to j."""
    prefix = np.concatenate([[0.0], np.cumsum(values)])
    return prefix[None, :] - prefix[:, None]


class _Cutter:
    """Cuts one order into stages of one width, at one micro-batch size, for every depth.

    Args:
        devices: of the stage whose all-reduce takes longest.
    """

    def __init__(self, search: _ShapeSearch, table: Intervals, shape: _Shape, bandwidth: float, devices: tuple[int, ...]) -> None:
        self.problem, self.limit = search.problem, search.limit
        self.table, self.b = table, shape.microbatch_size
        self.samples = self.b // shape.width
        seconds, self.amounts = search.seconds_of(table, self.samples), search.amounts_of(table)
        cluster, trainable = self.problem.cluster, table.trainable
        # A ring's time grows in proportion to the bytes, apart from its latency.
        most = max(float(trainable.max()), 2.0)
        low, high = cluster.allreduce_s(1.0, devices), cluster.allreduce_s(most, devices)
        reduce = np.where(trainable > 0, low + (high - low) * (trainable - 1) / (most - 1), 0.0)
        busy = seconds + table.entering * self.samples / bandwidth
        self.seconds = np.maximum(busy, reduce / self.problem.accumulation(self.b))
        self.seconds[np.tril_indices(len(self.seconds))] = np.inf
        # By the versions of the weights at every position from the end: least slowest stage of i.., and where its first one ends.
        self._rows: dict[tuple[int, ...], tuple[np.ndarray, np.ndarray]] = {}

    def best(self, depth: int) -> tuple[float, list[tuple[int, int]] | None]:
        """The least slowest stage over all cuts into `depth` stages that fit, and the stages; None if none does."""
        copies = tuple(self._copies(p, depth) for p in range(1, depth + 1))
        value_s = float(self._row(copies)[0][0])
        if not np.isfinite(value_s):
            return value_s, None
        cuts, i = [], 0
        for p in range(depth, 0, -1):
            j = int(self._row(copies[:p])[1][i])
            cuts.append((i, j))
            i = j
        return value_s, cuts

    def _row(self, copies: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        if copies not in self._rows:
            p = len(copies)
            if p == 1:
                rest = np.full(len(self.seconds), np.inf)
                rest[-1] = 0.0
            else:
                rest = self._row(copies[:-1])[0]
            slowest = np.maximum(np.where(self._needs(p, copies[-1]) <= self.limit, self.seconds, np.inf), rest[None, :])
            ends = slowest.argmin(axis=1)
            self._rows[copies] = slowest[np.arange(len(ends)), ends], ends
        return self._rows[copies]

    def _in_flight(self, position: int) -> int:
        """Micro-batches in flight at a position from the end."""
        return self.problem.regime.held(position, self.problem.minibatch_size // self.b)

    def _copies(self, position: int, depth: int) -> int:
        """Copies of the weights at a position from the end of a pipeline of `depth` stages."""
        weights = self.problem.regime.weights
        if weights.flushes:
            return 1
        accumulation, warmup = max(self.problem.accumulation(self.b), 1), max(self._in_flight(position), 1) - 1
        return weights.copies(PipelinePosition(warmup=warmup, depth=depth, accumulation=accumulation))

    def _needs(self, position: int, copies: int) -> np.ndarray:
        """Bytes on a device of every interval."""
        return self.amounts.held(self.samples, copies).peak(self._in_flight(position))
