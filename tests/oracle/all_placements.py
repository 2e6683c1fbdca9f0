"""Everything that can be done with a small problem on unequal devices: all convex partitions, all devices, all micro-batch sizes.

It shares nothing with the planners: which devices are alike is found here, from the fields of the cluster; what a plan takes is
the strategy's prediction.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import replace

from gpp import Cluster, Even, OneFOneB, Strategy
from gpp.cost.problem import Problem
from gpp.errors import Infeasible, InvalidPlan
from gpp.plan.build import make_plan
from tests.oracle.exhaustive import convex_partitions


def optimum_s(problem: Problem) -> float | None:
    """Predicted seconds of the best plan; None if nothing fits."""
    strategy = Strategy(name="test", planner=Even(), schedule=OneFOneB())
    best = float("inf")
    every = {count: list(placements(problem.cluster, count)) for count in range(1, problem.cluster.num_devices + 1)}
    for masks in convex_partitions(problem.graph, problem.cluster.num_devices):
        with contextlib.suppress(InvalidPlan):
            for placement in every[len(masks)]:
                for b in problem.microbatch_sizes():
                    if all(b % len(devices) == 0 for devices in placement):
                        parts = [(mask, len(devices)) for mask, devices in zip(masks, placement, strict=True)]
                        order = make_plan(problem, "x", parts, b)  # raises where stages form a cycle
                        place = dict(zip(masks, placement, strict=True))
                        stages = tuple(replace(stage, devices=place[sum(1 << op for op in stage.ops)]) for stage in order.stages)
                        with contextlib.suppress(Infeasible):
                            plan = replace(order, stages=stages)
                            plan.validate(problem)
                            best = min(best, strategy.predict(plan, problem, record=False).metrics.iteration_s)
    return best if best < float("inf") else None


def placements(cluster: Cluster, count: int) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Every way to give `count` stages devices, once of all that become one another when devices that are alike change places."""
    kind = _kinds(cluster)
    seen = set()
    for owner in itertools.product(range(-1, count), repeat=cluster.num_devices):
        key = tuple(tuple(sorted(k for k, o in zip(kind, owner, strict=True) if o == s)) for s in range(count))
        if all(key) and key not in seen:
            seen.add(key)
            yield tuple(tuple(d for d, o in enumerate(owner) if o == s) for s in range(count))


def _kinds(cluster: Cluster) -> list[int]:
    """For every device the first one with which it can change places, by what the user wrote of both."""

    def told(a: int, b: int) -> object:
        """Whatever decides on the link of two devices."""
        nodes = cluster.nodes[a] == cluster.nodes[b]
        entries = [pair.link for pair in cluster.links if set(pair.between) == {a, b}]
        names = {cluster.devices[a].name, cluster.devices[b].name}
        return nodes, entries, [pair.link for pair in cluster.links if set(pair.between) == names]

    def alike(a: int, b: int) -> bool:
        others = (d for d in range(cluster.num_devices) if d not in (a, b))
        return cluster.devices[a] == cluster.devices[b] and all(told(a, d) == told(b, d) for d in others)

    return [next(b for b in range(a + 1) if b == a or alike(a, b)) for a in range(cluster.num_devices)]
