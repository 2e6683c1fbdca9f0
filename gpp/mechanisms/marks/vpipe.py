"""vPipe's planner: layers move between neighbours while that helps, each stage made to fit (Zhao et al., IEEE TPDS 33(3), 2022).

Objective (reported in the plan's explanation): seconds of a forward and a backward of a micro-batch in the slowest stage, what is
added to make it fit included. First the bytes that stages lack count, then the slowest stage, then the sum of squares.
The best partition of every micro-batch size is predicted, and the best prediction wins.

Search: the blocks of the model (see below) start balanced by compute. A pass makes tentative moves of 1 .. `moves` blocks
over the borders: the best one over any border, better or not, which is locked then, until all borders are. The best prefix of
the pass is kept. Passes go on until one gains nothing (Kernighan-Lin).

Constraints:
1. Stages are runs of whole blocks of the depth-first order, one for each device.
2. Memory: as many micro-batches as the schedule has at the position, and the weight policy's versions; stages that lack memory swap
   and recompute their tail (`gpp.mechanisms.marks.tail`).
3. A stage has one device. All stages use the same b; b is swept.

With `path` nothing is searched: a plan file of vPipe's, {"partition": blocks of each stage, "recompute_ratio": part of each stage's
operators, from its last one on, that is computed again}, is read and predicted.

Complexity: a pass makes O(S^2 moves) partitions, of which each has two new stages.

Departures: the body of the paper is not public to us, and the public code has no planner. Published: moves between neighbours only,
partition first and memory for each stage then, swaps that fill the link. The passes are ours, after the exchange that the
method is said to be.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import ClassVar, NamedTuple, final

from gpp.cost.problem import Problem
from gpp.errors import Infeasible, InvalidFile
from gpp.graph.op_graph import OpGraph, bits
from gpp.mechanisms.marks.fitted import FittedStages, Stretch, one_minibatch
from gpp.mechanisms.marks.stage import marked
from gpp.mechanisms.marks.tail import Tail
from gpp.plan.plan import Objective, Plan
from gpp.planners.base import AbstractPlanner, Predict
from gpp.planners.chains.even import even_cut
from gpp.planners.common.incumbent import MARGIN
from gpp.planners.common.linear_orders import depth_first_order
from gpp.serialization import read_json
from gpp.settings import Count, Natural, settings

Counts = tuple[int, ...]
"""Blocks of each stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFile:
    """A plan file of vPipe's.

    Args:
        partition: blocks of each stage.
        recompute_ratio: part of each stage's operators, its last ones, that is computed again.
    """

    partition: tuple[int, ...]
    recompute_ratio: tuple[float, ...]


@final
@settings("strategy.planner")
class VPipe(AbstractPlanner):
    """Moves of blocks between neighbours, or a plan file.

    Args:
        moves: blocks that move over a border at most.
        swap: whether stages may swap.
        path: of a plan file, instead of a search.
        sums_before: of a plan file's model, the sums before its first residual one, which its blocks count: CPM's sum of two
            embeddings, which is one operator here, is one.
    """

    marks: ClassVar[bool] = True

    moves: Count = 3
    swap: bool = True
    path: str | None = None
    sums_before: Natural = 0

    @property
    def fits_by(self) -> Tail:
        return Tail(swap=self.swap)

    def plan(self, problem: Problem, predict: Predict) -> Plan:
        run = one_minibatch(problem)
        order = depth_first_order(run.graph)
        blocks = residual_blocks(run.graph, order)
        file = None if self.path is None else read_plan_file(self.path, len(blocks), self.sums_before, run.cluster.num_devices)
        best: tuple[float, float, Plan] | None = None
        for b in run.microbatch_sizes():
            search = _Moves(run, order, blocks, b, self)
            if file is None:
                counts = search.solve()
                plan, slowest = search.plan(counts), search.rank(counts).slowest
            else:
                plan, slowest = _as_filed(search, file)
            if plan is None:
                continue
            seconds = predict(plan).metrics.iteration_s
            if best is None or seconds < best[0] * MARGIN:
                best = seconds, slowest, plan
        if best is None:
            raise Infeasible(
                f"no partition of {len(blocks)} blocks that vPipe's moves reach fits",
                "devices with more memory, more devices, a smaller micro-batch, or strategy=dawnpiper",
            )
        _, slowest, plan = best
        objective = Objective(value_s=slowest, scope="a micro-batch for the slowest stage")
        source = f"read from {self.path}" if self.path else "blocks moved between neighbours"
        line = f"own objective: {objective}; {len(blocks)} blocks in {len(plan.stages)} stages, {source}"
        return replace(plan, objective=objective, explanation=(line,))


def residual_blocks(graph: OpGraph, order: tuple[int, ...]) -> list[tuple[int, int]]:
    """The blocks of an order, as intervals of positions: each ends at a sum with what went past its operators; what is behind the
    last sum is a block of its own.

    An operator, or a group of them, is a sum if it reads two others of which one depends on the other, since then one of them was
    carried past.
    """
    reads = graph.predecessors
    ends = {n for n, op in enumerate(order, 1) if any(graph.descendants[other] & reads[op] for other in bits(reads[op]))}
    return list(pairwise(sorted({0, len(order)} | ends)))


def read_plan_file(path: str, num_blocks: int, sums_before: int, num_devices: int) -> PlanFile:
    """A plan file for a model of so many blocks, its first stage without the blocks of `sums_before`.

    Raises:
        InvalidFile: it is no plan file, or not for this model and these devices.
    """
    setting = "strategy.planner.path"
    file = read_json(PlanFile, Path(path), setting=setting)
    counts, ratios = file.partition, file.recompute_ratio

    def refuse(place: str, value: object, rule: str, fix: str) -> None:
        raise InvalidFile(path, place, rule, fix, [value], setting)

    if not 1 <= len(counts) <= num_devices:
        rule = f"must have 1 to {num_devices} stages, one for each device"
        refuse("partition", list(counts), rule, "use a cluster of as many devices")
    if len(ratios) != len(counts):
        refuse("recompute_ratio", list(ratios), f"must have one for each of {len(counts)} stages", "add or remove some")
    for s, (count, ratio) in enumerate(zip(counts, ratios, strict=True)):
        least = 1 + sums_before * (s == 0)
        if count < least:
            refuse(f"partition[{s}]", count, f"must be at least {least}", "give every stage a block")
        if not 0.0 <= ratio <= 1.0:
            refuse(f"recompute_ratio[{s}]", ratio, "must be from 0 to 1", "0 recomputes nothing, 1 the whole stage")
    if sum(counts) != num_blocks + sums_before:
        rule = f"must sum up to the model's {num_blocks + sums_before} blocks, here {sum(counts)}"
        refuse("partition", list(counts), rule, "take the model of the file, its operators not coarsened (graph.max_ops=null)")
    return replace(file, partition=(counts[0] - sums_before, *counts[1:]))


def _as_filed(search: _Moves, file: PlanFile) -> tuple[Plan | None, float]:
    """The plan of a file, whether it fits or not, and seconds of its slowest stage."""
    stretches = search.stretches(file.partition)
    plan = search.stages.unmarked_plan("vpipe", stretches)
    stages = tuple(
        marked(stage, recompute=stage.ops[len(stage.ops) - int(ratio * len(stage.ops)) :])
        for stage, ratio in zip(plan.stages, file.recompute_ratio, strict=True)
    )
    plan = replace(plan, stages=stages)
    needs = plan.device_memory(search.problem, {s: stage.in_flight for s, stage in enumerate(stages)})
    if any(need > search.problem.cluster.devices[d].memory_bytes for d, need in needs.items()):
        return None, 0.0
    return plan, max(bill.forward_s + bill.backward_s for bill in plan.bills(search.problem))


class _Rank(NamedTuple):
    """What a partition is judged by: bytes that stages lack, seconds of the slowest stage, the sum of squares."""

    lacking: float
    slowest: float
    squares: float


class _Moves:
    """The search at one micro-batch size."""

    def __init__(self, problem: Problem, order: tuple[int, ...], blocks: list[tuple[int, int]], b: int, settings: VPipe) -> None:
        self.problem, self.blocks, self.most = problem, blocks, settings.moves
        self.count = min(problem.cluster.num_devices, len(blocks))
        depth = None if problem.cluster.homogeneous and problem.regime.weights.flushes else self.count
        self.memory = settings.fits_by
        self.stages = FittedStages(problem, order, b, self.memory, depth)
        self._ranks: dict[Counts, _Rank] = {}

    def stretches(self, counts: Counts) -> list[Stretch]:
        """The stages of a partition, in order."""
        out, at = list[Stretch](), 0
        for s, count in enumerate(counts):
            out.append(Stretch(self.blocks[at][0], self.blocks[at + count - 1][1], len(counts) - s))
            at += count
        return out

    def rank(self, counts: Counts) -> _Rank:
        """What a partition is judged by; what does not fit counts with its own seconds."""
        if counts not in self._ranks:
            stretches = self.stretches(counts)
            seconds = [self.stages.seconds(one) for one in stretches]
            lacking = [one for one, took in zip(stretches, seconds, strict=True) if took == float("inf")]
            took = [self.stages.kept_s(one) if one in lacking else took for one, took in zip(stretches, seconds, strict=True)]
            bytes_lacking = sum(self.memory.lacking(self.stages.question(one)) for one in lacking)
            self._ranks[counts] = _Rank(bytes_lacking, max(took), sum(one * one for one in took))
        return self._ranks[counts]

    def plan(self, counts: Counts) -> Plan | None:
        """The plan of a partition; None if it does not fit."""
        return None if self.rank(counts).lacking else self.stages.plan("vpipe", self.stretches(counts))

    def solve(self) -> Counts:
        """The partition at which no pass gains any more."""
        prefix = self.stages.prefix_s(1)
        weights = [float(prefix[j] - prefix[i]) for i, j in self.blocks]
        best = tuple(j - i for i, j in even_cut(weights, self.count))
        while True:
            found = self._pass(best)
            if self.rank(found) >= self.rank(best):
                return best
            best = found

    def _pass(self, start: Counts) -> Counts:
        """The best partition on the way on which every border is crossed once."""
        unlocked, here, best = set(range(self.count - 1)), start, start
        while unlocked:
            moved = [(self.rank(other), border, other) for border in sorted(unlocked) for other in self._over(here, border)]
            if not moved:
                break
            _, border, here = min(moved)
            unlocked.remove(border)
            best = min(best, here, key=self.rank)
        return best

    def _over(self, counts: Counts, border: int) -> list[Counts]:
        """Partitions with some blocks moved over a border, one way or the other; every stage keeps one."""
        out = list[Counts]()
        for blocks in (*range(-self.most, 0), *range(1, self.most + 1)):
            left, right = counts[border] + blocks, counts[border + 1] - blocks
            if left >= 1 and right >= 1:
                out.append((*counts[:border], left, right, *counts[border + 2 :]))
        return out
