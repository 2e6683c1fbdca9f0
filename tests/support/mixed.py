"""Problems on clusters of unequal devices, and everything that can be done with a small one."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Iterator
from dataclasses import replace

from gpp.cluster import Link
from gpp.cost.problem import Problem
from gpp.errors import Infeasible, InvalidPlan
from gpp.graph.random_graphs import random_dag, random_series_parallel
from gpp.plan.build import make_plan
from gpp.planners.chains.even import Even
from gpp.schedules.one_f_one_b import OneFOneB
from gpp.strategy import Strategy
from tests.oracle.exhaustive import convex_partitions
from tests.support.problems import Rate, cluster

INTER = Link(latency_s=2e-5, bandwidth_bytes_per_s=1e9)


def mixed_problem(seed: int, *, ops: tuple[int, int] = (12, 40), devices: tuple[int, int] = (4, 12)) -> Problem:
    """Devices of one to three speeds, with all or half of the memory, in one node or two."""
    rng = random.Random(f"mixed {seed}")
    num_devices = rng.randint(*devices)
    num_ops = rng.randint(max(ops[0], min(num_devices, ops[1])), ops[1])
    graph = (random_series_parallel if rng.random() < 0.6 else random_dag)(num_ops, seed, skew=rng.choice([0.0, 0.5, 1.0]))
    nodes = 2 if num_devices % 2 == 0 and rng.random() < 0.5 else 1
    link = Link(latency_s=1e-5, bandwidth_bytes_per_s=rng.choice([1e9, 4e10]))
    memory = rng.choice([1e12, 1e8, 4e7]) if num_ops > 8 else rng.choice([1e12, 4e7, 2.5e7])
    base = cluster(num_devices, memory, link, INTER, nodes)
    kinds = [
        replace(base.devices[0], speed_factor=speed, memory_bytes=memory * share)
        for speed, share in itertools.product((1.0, 0.5, 0.25), (1.0, 0.5))
    ]
    if num_ops <= 8:
        kinds = rng.sample(kinds, 3)
    chosen = tuple(rng.choice(kinds) for _ in range(num_devices))
    return Problem(
        graph=graph,
        cost=Rate(),
        minibatch_size=rng.choice([4, 8]) * num_devices,
        optimizer_state_factor=2.0,
        cluster=replace(base, devices=chosen),
    )


def optimum_s(problem: Problem) -> float | None:
    """The best of all convex partitions on all devices, with every micro-batch size; None if nothing fits."""
    strategy = Strategy(name="test", planner=Even(), schedule=OneFOneB())
    best = float("inf")
    for masks in convex_partitions(problem.graph, problem.cluster.num_devices):
        with contextlib.suppress(InvalidPlan):
            for placement in _placements(problem, len(masks)):
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


def _placements(problem: Problem, count: int) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Every way to give `count` stages devices, one of those that differ in names only."""
    labels = list(zip(problem.type_of_device, problem.cluster.nodes, strict=True))
    seen = set()
    for owner in itertools.product(range(-1, count), repeat=len(labels)):
        key = tuple(tuple(sorted(label for label, o in zip(labels, owner, strict=True) if o == s)) for s in range(count))
        if all(key) and key not in seen:
            seen.add(key)
            yield tuple(tuple(d for d, o in enumerate(owner) if o == s) for s in range(count))
