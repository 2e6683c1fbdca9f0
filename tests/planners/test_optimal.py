from __future__ import annotations

import re
import sys
from dataclasses import replace

import pytest

from gpp import GraphPipe, Optimal
from gpp.cost.models.constant import Constant
from gpp.cost.problem import Problem
from gpp.errors import InvalidConfig
from gpp.graph.random_graphs import random_dag
from gpp.serialization import to_json
from tests.oracle.exhaustive import Exhaustive
from tests.support.graphs import chain
from tests.support.long import thinned
from tests.support.problems import Rate, cluster, random_problem, run, towers, uneven

pytest.importorskip("ortools")


def proven_s(plan) -> float:
    return float(re.search(r"under ([0-9.e+-]+) s", plan.explanation[1])[1])


@pytest.mark.parametrize("seed", thinned(range(12), 3))
def test_against_the_oracle(seed):
    """Between the optimum and what is proven; on small problems at the optimum or next to it."""
    problem = random_problem(seed, max_ops=6, max_devices=4)
    problem = uneven(problem, seed) if seed % 4 == 0 else problem
    found, best = run(Optimal(limit=4, colocate="never"), problem), run(Exhaustive(), problem)
    assert (found is None) == (best is None)
    if found and best:
        assert proven_s(found[0]) <= best[1] * (1 + 1e-5)
        assert proven_s(found[0]) <= found[1] * (1 + 1e-5)
        assert found[1] <= best[1] * 1.02
        if problem.cluster.homogeneous and len(set(problem.cluster.nodes)) == 1:
            # Elsewhere other devices than the oracle's may be better.
            assert best[1] <= found[1] * (1 + 1e-9)
        assert found[0].planner == "optimal" and found[0].explanation


def test_no_worse_than_graphpipe_on_a_mid_size_graph():
    problem = Problem(graph=random_dag(16, 5), cluster=cluster(4), cost=Rate(), minibatch_size=16, optimizer_state_factor=2.0)
    found, ours = run(Optimal(limit=2, colocate="never"), problem), run(GraphPipe(colocate="never"), problem)
    assert proven_s(found[0]) <= found[1] <= ours[1] * (1 + 1e-9)


def test_no_worse_than_a_plan_of_graphpipes_that_shares_devices():
    problem = Problem(graph=random_dag(12, 3), cluster=cluster(2), cost=Rate(), minibatch_size=8, optimizer_state_factor=2.0)
    found, ours = run(Optimal(limit=1), problem), run(GraphPipe(), problem)
    assert ours[0].shares_devices and found[1] == ours[1] < run(Optimal(limit=1, colocate="never"), problem)[1]
    assert "its devices hold several stages" in found[0].explanation[-1] and "searched to the end" in found[0].explanation[0]


def test_no_stage_has_more_replicas_than_asked_for():
    problem = Problem(graph=chain(3), cluster=cluster(4), cost=Rate(), minibatch_size=8)
    free, two, none = (run(Optimal(limit=1, **most), problem) for most in ({}, {"max_replicas": 2}, {"replication": False}))
    assert free and two and none
    widths = [max(len(stage.devices) for stage in found[0].stages) for found in (free, two, none)]
    assert widths == [4, 2, 1] and free[1] <= two[1] <= none[1]


def test_proves_a_plan_without_a_bubble():
    """Two towers on two devices and one micro-batch: nothing but the towers' own time."""
    problem = Problem(graph=towers(2, 2), cluster=cluster(2), cost=Constant(), minibatch_size=4)
    found = run(Optimal(limit=4, colocate="never"), problem)
    assert found[1] == pytest.approx(run(Exhaustive(), problem)[1])
    assert proven_s(found[0]) >= 0.98 * found[1]


def test_the_same_plan_twice():
    problem = random_problem(11, max_ops=7, max_devices=4)
    texts = {to_json(replace(run(Optimal(limit=2), problem)[0], search_s=0.0)) for _ in range(2)}
    assert len(texts) == 1


def test_limits(monkeypatch):
    problem = Problem(graph=chain(3), cluster=cluster(2), cost=Constant(), minibatch_size=2)
    with pytest.raises(InvalidConfig, match="max_ops"):
        run(Optimal(max_ops=2), problem)
    monkeypatch.setitem(sys.modules, "ortools.sat.python", None)
    with pytest.raises(InvalidConfig, match=r"-e '.\[exact\]'"):
        run(Optimal(), problem)
