"""A planner that may choose the micro-batch size is never behind one to which a size is given, and the bound knows all sizes."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from gpp import GraphPipe, Link
from gpp.cost.problem import Problem
from gpp.errors import Infeasible
from gpp.graph.random_graphs import random_dag, random_series_parallel
from gpp.planners.bounds.lower_bound import lower_bound
from tests.support.long import thinned
from tests.support.problems import Rate, cluster, run


def odd_problem(seed: int) -> Problem:
    """3, 5 or 6 devices, which no power of two divides evenly, and often scarce memory."""
    rng = random.Random(f"sizes {seed}")
    devices, minibatch, ops = rng.choice([3, 5, 6]), rng.choice([12, 24, 48, 36, 30]), rng.randint(2, 9)
    make = random_dag if rng.random() < 0.5 else random_series_parallel
    graph, memory = make(ops, seed, skew=rng.choice([0.0, 0.5, 1.0])), 10 ** rng.uniform(6.9, 7.9)
    state = rng.choice([0.0, 2.0])
    link = Link(latency_s=1e-5, bandwidth_bytes_per_s=rng.choice([1e9, 4e10]))
    return Problem(
        graph=graph,
        cost=Rate(),
        minibatch_size=minibatch,
        optimizer_state_factor=state,
        cluster=cluster(devices, memory, link),
    )


@pytest.mark.parametrize("seed", thinned([32, 35, 37, 42, 43, 46, 48, 54, 56, 59], 4))
def test_no_imposed_size_is_better_than_the_chosen_one(seed):
    problem = odd_problem(seed)
    chosen = run(GraphPipe(colocate="never"), problem)
    try:
        bound = lower_bound(problem).iteration_s
    except Infeasible:
        bound = float("inf")
    for b in range(1, problem.minibatch_size + 1):
        if problem.minibatch_size % b == 0:
            imposed = run(GraphPipe(colocate="never"), replace(problem, microbatch_size=b))
            if imposed is not None:
                assert chosen is not None and chosen[1] <= imposed[1] * (1 + 1e-9), b
                assert bound <= imposed[1] * (1 + 1e-9), b
