"""Every plan of a small problem in which devices may hold several stages, against `graphpipe`.

All partitions into convex stages without a cycle, of any number of stages; every set of devices for each of them that divides the
micro-batch; every micro-batch size. Devices are equal, and are told apart by the order in which they appear. What is left out is
proved to take longer, or to need more memory than there is (`_Space.of`); every plan that is predicted is held against the first
proof. The planner's own plan is the first to beat, and nothing else of it is used. Stages are numbered in one topological order
for each partition, which decides between passes of a device that could begin at the same time.

Complexity: about 10^4 plans at 5 operators and 3 devices, and 10^6 at 6 and 4, of which some hundred have to be predicted.
"""

from __future__ import annotations

import itertools
import random
import time
from collections import Counter
from collections.abc import Iterator
from functools import cache
from statistics import median
from typing import NamedTuple

import numpy as np

from gpp import Link, Plan, Strategy
from gpp.cost.problem import Problem
from gpp.cost.stage import StageCost
from gpp.errors import Infeasible
from gpp.graph.op_graph import bits
from gpp.graph.random_graphs import random_dag, random_series_parallel
from gpp.plan.build import make_plan
from gpp.planners.bounds.lower_bound import lower_bound
from gpp.stage import Stage
from tests.oracle.exhaustive import convex_partitions
from tests.support.conf import option
from tests.support.problems import Rate, cluster

Devices = tuple[int, ...]


class Answer(NamedTuple):
    """The planner's predicted seconds, the best of all plans and its seconds; how many plans there are, and were predicted."""

    planner_s: float
    seconds: float
    plan: Plan | None
    num_plans: int
    num_predicted: int


def problem_of(number: int, most_ops: int = 6, most_devices: int = 4) -> Problem:
    """A random problem: series-parallel or not, a fast link or a slow one, memory that is loose, tight or very tight."""
    rng = random.Random(f"shared devices {number}")
    num_ops, devices = rng.randint(min(3, most_ops), most_ops), rng.randint(2, most_devices)
    make = random_series_parallel if rng.random() < 0.6 else random_dag
    return Problem(
        graph=make(num_ops, number, skew=rng.choice([0.0, 0.5, 1.0, 1.0])),
        cost=Rate(),
        minibatch_size=rng.choice([4, 6, 8]),
        optimizer_state_factor=rng.choice([0.0, 2.0]),
        cluster=cluster(
            devices, rng.choice([1e12, 2.5e7, 1.5e7]), Link(latency_s=1e-5, bandwidth_bytes_per_s=rng.choice([1e9, 4e10]))
        ),
    )


def answer(problem: Problem, strategy: Strategy) -> Answer:
    """The best of all plans, the planner's among them.

    Raises:
        Infeasible: the planner finds nothing, and there is nothing.
    """
    try:
        planner_s, why = strategy.predict(strategy.plan(problem), problem, record=False).metrics.iteration_s, None
    except Infeasible as error:
        planner_s, why = float("inf"), error
    best_s, best, num_plans, num_predicted = planner_s, None, 0, 0
    spaces = [_Space.of(problem, masks, b) for masks in _partitions(problem) for b in problem.microbatch_sizes()]
    for space in sorted(spaces, key=lambda space: space.least_s):
        num_plans += space.num_plans
        for least_s, placement in space.below(best_s):
            if least_s >= best_s:
                break
            parts = [(mask, len(devices)) for mask, devices in zip(space.masks, placement, strict=True)]
            plan = make_plan(problem, "oracle", parts, space.b, ordered=True, placement=placement)
            try:
                plan.validate(problem)
            except Infeasible:
                continue
            seconds = strategy.predict(plan, problem, record=False).metrics.iteration_s
            assert seconds >= least_s * (1 - 1e-9), f"{plan} takes {seconds} s, and no plan like it less than {least_s} s"
            num_predicted += 1
            if seconds < best_s:
                best_s, best = seconds, plan
    if best_s == float("inf") and why is not None:
        raise why
    if best is not None:
        bound = lower_bound(problem).of(best)
        assert bound is not None and best_s >= bound.iteration_s * (1 - 1e-9), f"{best} takes {best_s} s, below {bound}"
    return Answer(planner_s, best_s, best, num_plans, num_predicted)


def _partitions(problem: Problem) -> Iterator[tuple[int, ...]]:
    """All partitions into convex stages that can be put into a topological order, in that order."""
    for masks in convex_partitions(problem.graph):
        left, out, done = list(masks), [], 0
        while left:
            mask = next((m for m in left if not _before(problem, m) & ~done), None)
            if mask is None:
                break
            left.remove(mask)
            out.append(mask)
            done |= mask
        if not left:
            yield tuple(out)


def _before(problem: Problem, mask: int) -> int:
    """The operators outside a set whose values it reads."""
    out = 0
    for op in bits(mask):
        out |= problem.graph.predecessors[op]
    return out & ~mask


class _Space(NamedTuple):
    """All placements of one partition at one micro-batch size, with the seconds that each takes at least."""

    masks: tuple[int, ...]
    b: int
    num_plans: int
    least_s: float
    bounds_s: np.ndarray
    groups: tuple[Devices, ...]

    @classmethod
    def of(cls, problem: Problem, masks: tuple[int, ...], b: int) -> _Space:
        """A device has the passes of its stages to do. Where every operator has a backward, a stage has its own to do between the
        first micro-batch's way to it and the last one's way back to where it began, which is also where the next step begins; and
        where all of them begin in one stage, a device has all of its passes to do between the shortest such ways of its stages.

        In a pipeline that drains, a stage holds a micro-batch for each stage on the longest way to the end, itself included, or all
        of them: with its weights and what stands by these, no device has room for less than that of all its stages.
        """
        graph, count, rounds = problem.graph, problem.cluster.num_devices, problem.minibatch_size // b
        groups = _groups(count, b, problem.max_replicas or count)
        deals, holds = _deals(len(masks), groups), np.array([[d in group for d in range(count)] for group in groups])
        seconds = np.array([[problem.stage_times(tuple(bits(mask)), b, group) for group in groups] for mask in masks])
        returns = graph.differentiated == graph.all_mask
        one_source = returns and sum(not before for before in graph.predecessors) == 1
        loads, there, back = (np.full((len(deals), count), start) for start in (0.0, np.inf, np.inf))
        ways, loops, least = list[np.ndarray](), list[np.ndarray](), np.zeros(len(deals))
        for s, mask in enumerate(masks):
            own, on = seconds[s, deals[:, s]], holds[deals[:, s]]  # (deals, direction); (deals, device)
            passes = rounds * own.sum(axis=1)
            way, loop = np.zeros_like(own), np.zeros(len(deals))  # there and back on any two ways; on one way
            for p in range(s):
                if returns and masks[p] & _before(problem, mask):
                    way, loop = np.maximum(way, ways[p]), np.maximum(loop, loops[p])
            least = np.maximum(least, loop + passes)
            ways.append(way + own)
            loops.append(loop + own.sum(axis=1))
            loads += np.where(on, passes[:, None], 0.0)
            there, back = (np.where(on, np.minimum(most, way[:, i, None]), most) for i, most in enumerate((there, back)))
        around = np.where(loads > 0, loads + there + back, 0.0) if one_source else loads
        bounds = np.maximum(least, around.max(axis=1))
        bounds[_held_bytes(problem, masks, b, groups, deals, holds).max(axis=1) > problem.cluster.devices[0].memory_bytes] = np.inf
        return cls(masks, b, len(deals), float(bounds.min()), bounds, groups)

    def below(self, limit_s: float) -> Iterator[tuple[float, list[Devices]]]:
        """The placements that may take less, the most promising first."""
        deals, rows = _deals(len(self.masks), self.groups), np.flatnonzero(self.bounds_s < limit_s)
        for row in rows[np.argsort(self.bounds_s[rows], kind="stable")]:
            yield float(self.bounds_s[row]), [self.groups[g] for g in deals[row]]


def _held_bytes(
    problem: Problem, masks: tuple[int, ...], b: int, groups: tuple[Devices, ...], deals: np.ndarray, holds: np.ndarray
) -> np.ndarray:
    """Bytes that each device surely holds, of each deal."""
    depths = [1] * len(masks)
    for s in reversed(range(len(masks))):
        behind = (depths[t] for t in range(s + 1, len(masks)) if masks[s] & _before(problem, masks[t]))
        depths[s] = 1 + max(behind, default=0)
    out = np.zeros((len(deals), holds.shape[1]))
    for s, mask in enumerate(masks):
        bills = [
            StageCost.of(problem, Stage(ops=tuple(bits(mask)), devices=group, microbatch_size=b, in_flight=b)) for group in groups
        ]
        in_flight = min(depths[s], problem.minibatch_size // b)
        own = np.array([bill.static_bytes + bill.microbatch_bytes * in_flight for bill in bills])
        out += np.where(holds[deals[:, s]], own[deals[:, s]][:, None], 0.0)
    return out


@cache
def _groups(count: int, b: int, most: int) -> tuple[Devices, ...]:
    """Sets of devices over which a micro-batch can be split evenly."""
    return tuple(g for size in range(1, min(count, most) + 1) if b % size == 0 for g in itertools.combinations(range(count), size))


@cache
def _deals(stages: int, groups: tuple[Devices, ...]) -> np.ndarray:
    """A group for every stage, in rows; devices appear in the order of their numbers, since all are equal."""
    devices = 1 + max(device for group in groups for device in group)
    after = np.full((devices + 1, len(groups)), -1, dtype=np.int8)  # how many devices have appeared; -1 where one is skipped
    for seen, (g, group) in itertools.product(range(devices + 1), enumerate(groups)):
        new = [device for device in group if device >= seen]
        if new == list(range(seen, seen + len(new))):
            after[seen, g] = seen + len(new)
    rows, appeared = np.zeros((1, 0), dtype=np.int8), np.zeros(1, dtype=np.int8)
    for _ in range(stages):
        at, given = np.nonzero(after[appeared] >= 0)
        rows, appeared = np.column_stack((rows[at], given.astype(np.int8))), after[appeared[at], given]
    return rows


def main(first: int, count: int, most_ops: int, most_devices: int) -> int:
    """Compares the planner with all plans of `count` problems; 1 if it has none where there is one."""
    strategy, ratios, counts = option("strategy", "graphpipe"), list[float](), Counter[str]()
    for number in range(first, first + count):
        problem, start = problem_of(number, most_ops, most_devices), time.process_time()
        sizes = f"{problem.graph.num_ops} operators, {problem.cluster.num_devices} devices, mini-batch {problem.minibatch_size}"
        words = f"{number:>4}: {sizes}"
        try:
            found = answer(problem, strategy)
        except Infeasible:
            counts["infeasible"] += 1
            print(f"{words}: nothing fits", flush=True)
            continue
        counts["plans"] += found.num_plans
        counts["predicted"] += found.num_predicted
        ratios.append(found.planner_s / found.seconds)
        print(
            f"{words}: planner / best of {found.num_plans} plans {ratios[-1]:.4f}; {found.num_predicted} predicted, "
            f"{time.process_time() - start:.1f} CPU s",
            flush=True,
        )
    if ratios:
        within = sum(ratio <= 1 + 1e-6 for ratio in ratios)
        print(
            f"{len(ratios)} problems, {counts['infeasible']} infeasible, {counts['plans']} plans, {counts['predicted']} predicted: "
            f"{within} as good as the best, {sum(ratio <= 1.02 for ratio in ratios)} within 2 %; "
            f"median {median(ratios):.4f}, worst {max(ratios):.4f}"
        )
    return int(any(ratio == float("inf") for ratio in ratios))
