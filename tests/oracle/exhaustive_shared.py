"""Every plan of a small problem in which devices may hold several stages: a second opinion on `graphpipe`'s search.

All partitions into convex stages without a cycle, all sets of devices for each of them, all micro-batch sizes; each judged by the
program that would run. Shares nothing with the planners: no tables, no bounds, no moves, no layouts. What a device has to do is
a bound that needs no proof, and only what it excludes is left out. Equal devices are told apart by the order in which they appear.

Complexity: (2^D - 1)^S assignments of S stages to D devices for each partition, in arrays; for 7 operators and 2 or 3 devices.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import networkx as nx
import numpy as np

from gpp import Plan, Strategy
from gpp.cost.problem import Problem
from gpp.errors import Infeasible
from gpp.graph.op_graph import bits
from gpp.plan.build import make_plan
from tests.oracle.exhaustive import convex_partitions


class Optimum(NamedTuple):
    """The best plan, its predicted seconds, and how many plans there are and were predicted."""

    plan: Plan
    seconds: float
    num_plans: int
    num_predicted: int


def optimum(problem: Problem, strategy: Strategy, most_stages: int) -> Optimum | None:
    """The best of all plans of at most so many stages; None if none fits.

    Args:
        problem: equal devices in one node.
    """
    count = problem.cluster.num_devices
    assert problem.cluster.homogeneous and len(set(problem.cluster.nodes)) == 1
    groups = [g for size in range(1, count + 1) for g in itertools.combinations(range(count), size)]
    deals = {k: np.array(list(_deals(k, groups)), dtype=int) for k in range(1, min(most_stages, problem.graph.num_ops) + 1)}
    holds = np.array([[device in group for device in range(count)] for group in groups])
    found: list[tuple[float, tuple[int, ...], int, np.ndarray]] = []
    for masks in convex_partitions(problem.graph, most_stages):
        for b in (b for b in range(1, problem.minibatch_size + 1) if problem.minibatch_size % b == 0):
            if problem.microbatch_size in (None, b):
                seconds = np.array([[_busy_s(problem, mask, b, group) for group in groups] for mask in masks])
                deal = deals[len(masks)]
                loads = sum(np.where(holds[deal[:, s]], seconds[s, deal[:, s], None], 0.0) for s in range(len(masks)))
                found += [(float(most), masks, b, row) for most, row in zip(loads.max(axis=1), deal, strict=True)]
    best: Plan | None = None
    best_s, predicted = float("inf"), 0
    for least_s, masks, b, deal in sorted(found, key=lambda each: each[0]):
        if least_s >= best_s or least_s == float("inf"):
            break
        devices = [groups[g] for g in deal]
        if (order := _topological(problem, masks)) is None:
            continue
        parts = [(masks[p], len(devices[p])) for p in order]
        plan = make_plan(problem, "oracle", parts, b, ordered=True, placement=[devices[p] for p in order])
        try:
            plan.validate(problem)
        except Infeasible:
            continue
        predicted += 1
        took = strategy.predict(plan, problem).metrics.iteration_s
        if took < best_s:
            best, best_s = plan, took
    return best and Optimum(best, best_s, len(found), predicted)


def _deals(stages: int, groups: list[tuple[int, ...]]) -> Iterator[tuple[int, ...]]:
    """A group for every stage, devices appearing in the order of their numbers."""
    for deal in itertools.product(range(len(groups)), repeat=stages):
        seen: list[int] = []
        for g in deal:
            seen += [device for device in groups[g] if device not in seen]
        if seen == sorted(seen) and seen[-1] == len(seen) - 1:
            yield deal


def _busy_s(problem: Problem, mask: int, b: int, group: tuple[int, ...]) -> float:
    """Seconds of a stage's passes on each device of a group; infinite if its samples cannot be shared."""
    if b % len(group) or len(group) > (problem.max_replicas or len(group)):
        return float("inf")
    return problem.minibatch_size // b * sum(problem.stage_times(tuple(bits(mask)), b, group))


def _topological(problem: Problem, masks: tuple[int, ...]) -> tuple[int, ...] | None:
    """The stages in an order in which data goes forward, the smallest first operator first; None if they form a cycle."""
    owner = {op: p for p, mask in enumerate(masks) for op in bits(mask)}
    stages = nx.DiGraph((owner[t.producer], owner[c]) for t in problem.graph.tensors for c in t.consumers)
    stages.add_nodes_from(range(len(masks)))
    stages.remove_edges_from(list(nx.selfloop_edges(stages)))
    return tuple(nx.lexicographical_topological_sort(stages)) if nx.is_directed_acyclic_graph(stages) else None
