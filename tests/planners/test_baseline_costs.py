"""Baselines plan with the costs that they are judged by: only their objectives and their spaces tell them from `sequential`."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache

import pytest

from gpp import OneFOneB, PipeDream, Piper, Sequential, Strategy
from gpp.cost.models.constant import Constant
from gpp.cost.problem import Problem
from gpp.errors import Infeasible
from gpp.graph.random_graphs import random_dag
from gpp.planners.base import AbstractPlanner
from gpp.planners.chains import pipedream, piper
from gpp.planners.chains.downsets import Budget
from tests.support.chain_objectives import pipedream_s, piper_s
from tests.support.conf import option
from tests.support.long import thinned
from tests.support.problems import Rate
from tests.support.published import profile

CLUSTERS = ("summit_1x4", "flat", "local_4")
PIPER = Piper(tensor_parallel=False)
BASELINES = {
    "pipedream": (PipeDream(), pipedream_s, lambda problem: pipedream.FlatSearch(problem, PipeDream(), Budget("test", 60, 1e9))),
    "piper": (PIPER, piper_s, lambda problem: piper.PiperSearch(problem, PIPER, Budget("test", 60, 1e9))),
}


@cache
def posed(model: str, cluster_name: str, efficiency: float | None) -> Problem:
    """A profile, or a random graph with heavy weights, on a cluster of conf/ whose all-reduces may be slow."""
    cluster = option("cluster", cluster_name)
    if efficiency is not None:
        cluster = replace(cluster, collective_efficiency=efficiency)
    if model.startswith("random"):
        seed = int(model.removeprefix("random"))
        graph, cost = random_dag(random.Random(seed).randint(8, 20), seed, skew=1.0), Rate()
    else:
        graph, cost = profile(model), Constant()
    return Problem(graph=graph, cluster=cluster, cost=cost, minibatch_size=48, optimizer_state_factor=1.0)


def plan_of(planner: AbstractPlanner, problem: Problem):
    return Strategy(name="test", planner=planner, schedule=OneFOneB()).plan(problem)


@pytest.mark.parametrize("name", list(BASELINES))
@pytest.mark.parametrize("efficiency", [None, 0.1])
@pytest.mark.parametrize("cluster_name", thinned(CLUSTERS, len(CLUSTERS)))
@pytest.mark.parametrize(
    "model",
    [
        "pipedream_gnmt",
        pytest.param("pipedream_alexnet", marks=pytest.mark.long),
        pytest.param("random3", marks=pytest.mark.long),
        "random7",
    ],
)
def test_no_chain_is_better_by_the_baselines_own_objective(name, model, cluster_name, efficiency):
    """`sequential`'s chain is in the baseline's space: where the baseline is slower, its objective prefers what it chose.

    The objective is computed by hand, with the ring at the bandwidth that an all-reduce reaches.
    """
    problem = posed(model, cluster_name, efficiency)
    planner, objective, search = BASELINES[name]
    try:
        other = plan_of(Sequential(), problem)
    except Infeasible:
        pytest.skip("no chain fits this cluster")
    same_size = replace(problem, microbatch_size=other.stages[0].microbatch_size)
    mine = plan_of(planner, same_size)
    assert mine.objective.value_s == pytest.approx(objective(mine, same_size), rel=1e-6)
    # The plan may be plain data parallelism, where it is predicted faster than the chain that the objective prefers.
    best, _ = search(same_size).find(other.stages[0].microbatch_size)
    assert best <= objective(other, same_size) * (1 + 1e-6)
