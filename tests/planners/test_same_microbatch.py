from __future__ import annotations

import pytest

from gpp import GraphPipe, SameMicrobatch, Sequential
from gpp.cost.problem import Problem
from tests.support.problems import Rate, cluster, run, towers


@pytest.mark.parametrize("devices", [4, 6])
def test_the_cut_is_one_planners_and_the_micro_batch_the_others(devices: int) -> None:
    problem = Problem(graph=towers(2, 4), cluster=cluster(devices), cost=Rate(flop_per_s=3e3), minibatch_size=64)
    chain, chain_s = run(Sequential(replication=False), problem)
    _, full_s = run(GraphPipe(colocate="never", replication=False), problem)
    planner = SameMicrobatch(reference=Sequential(replication=False), planner=GraphPipe(colocate="never", replication=False))
    plan, seconds = run(planner, problem)
    assert {stage.microbatch_size for stage in plan.stages} == {chain.stages[0].microbatch_size}
    assert plan.depth < chain.depth and "Sequential" in plan.explanation[0]
    assert full_s <= seconds < chain_s
