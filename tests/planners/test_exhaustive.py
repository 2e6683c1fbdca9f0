from __future__ import annotations

import pytest

from gpp.cost.constant import Constant
from gpp.cost.problem import Problem
from gpp.errors import Infeasible, InvalidConfig
from gpp.graph.op_graph import mask_of
from gpp.graph.random_graphs import random_dag
from gpp.planners.exhaustive import Exhaustive, convex_partitions

from ..graphs import chain, diamond
from .cases import cluster, run, towers


def test_partitions_of_known_graphs():
    # A chain of n operators has 2^(n-1) partitions into intervals.
    assert len(list(convex_partitions(chain(5)))) == 16
    # Of the 15 partitions of a diamond's operators three are not convex: 0 with 3 but without 1, 2, or both.
    assert len(list(convex_partitions(diamond()))) == 15 - 4


def test_partitions_are_convex_and_different():
    graph = random_dag(6, 1)
    found = list(convex_partitions(graph))
    assert len({frozenset(stages) for stages in found}) == len(found)
    assert all(graph.is_convex(mask_of(stage)) for stages in found for stage in stages)


def test_spaces_are_nested():
    problem = Problem(graph=towers(2, 2), cluster=cluster(3), cost=Constant(fixed_s=0.1), minibatch_size=8)
    assert run(Exhaustive(), problem)[1] <= run(Exhaustive(space="graphpipe"), problem)[1]


def test_limits():
    with pytest.raises(InvalidConfig, match=r"graph\.max_ops"):
        run(Exhaustive(), Problem(graph=chain(10), cluster=cluster(2), cost=Constant(), minibatch_size=2))
    with pytest.raises(InvalidConfig, match="num_devices"):
        run(Exhaustive(), Problem(graph=chain(8), cluster=cluster(7), cost=Constant(), minibatch_size=2))
    with pytest.raises(InvalidConfig, match="space"):
        Exhaustive(space="all")
    with pytest.raises(Infeasible):
        Exhaustive().plan(Problem(graph=chain(2), cluster=cluster(2, 0.5), cost=Constant(), minibatch_size=2), lambda plan: None)
