"""Problems on clusters of unequal devices, with links by node, by device or by pair."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

from gpp.cluster import Link, PairLink
from gpp.cost.problem import Problem
from gpp.graph.random_graphs import random_dag, random_series_parallel
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


def linked(problem: Problem, seed: int) -> Problem:
    """The problem with rates of links by device, by type of device, or by pair."""
    rng = random.Random(f"linked {seed}")
    cluster, kinds = problem.cluster, sorted(set(problem.type_of_device))
    rates = (1e8, 1e9, 4e9, 4e10)

    def link() -> Link:
        return Link(latency_s=rng.choice([1e-5, 1e-4]), bandwidth_bytes_per_s=rng.choice(rates))

    how = seed % 3
    own = {kind: rng.choice([*rates, None]) for kind in kinds}
    rate = [own[kind] if how == 0 else rng.choice([*rates, None]) if how == 1 else None for kind in problem.type_of_device]
    devices = tuple(
        replace(device, name=f"type{kind}", bandwidth_bytes_per_s=each)
        for device, kind, each in zip(cluster.devices, problem.type_of_device, rate, strict=True)
    )
    pairs = list(itertools.combinations(range(cluster.num_devices), 2))
    links = [PairLink(between=pair, link=link()) for pair in rng.sample(pairs, rng.randint(1, len(pairs)))] if how == 2 else []
    if how > 0:
        names = list(itertools.combinations_with_replacement(sorted(f"type{kind}" for kind in kinds), 2))
        links += [PairLink(between=pair, link=link()) for pair in rng.sample(names, rng.randint(1, len(names)))]
    return replace(problem, cluster=replace(cluster, devices=devices, links=tuple(links)))
