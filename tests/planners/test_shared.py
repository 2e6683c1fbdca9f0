"""Devices that hold two stages."""

from __future__ import annotations

import contextlib
import random

import pytest

from gpp.errors import Infeasible
from gpp.plan.build import make_plan
from gpp.planners.chains.sequential import Sequential
from gpp.planners.graphpipe.colocate import independent, split_stages
from gpp.planners.graphpipe.graphpipe import GraphPipe
from gpp.schedules.one_f_one_b import OneFOneB
from gpp.strategy import Strategy
from tests.support.graphs import diamond, problem, two_towers
from tests.support.problems import random_problem


def strategy(planner) -> Strategy:
    return Strategy(name="test", planner=planner, schedule=OneFOneB())


def test_what_depends_on_nothing_outside() -> None:
    graph = diamond()  # 0 -> 1, 2 -> 3
    assert independent(graph, 0b1010) == 0
    assert independent(graph, 0b0111) == 0b0111
    assert independent(two_towers(2), two_towers(2).all_mask) == two_towers(2).all_mask


def test_two_branches_on_two_devices_run_side_by_side() -> None:
    """One branch a device and the join on either: the chain fills and drains, the cut plan does not."""
    prob = problem(two_towers(2), 2, 8, microbatch_size=2)
    first = 0b00011  # operators 0 and 1; 2 and 3 are the other tower, 4 joins them
    plan = make_plan(prob, "test", [(first, 1), (prob.graph.all_mask & ~first, 1)], 2)
    own = strategy(GraphPipe(share_devices=True))
    cut = split_stages(plan, prob, lambda candidate: own.predict(candidate, prob))
    assert len(cut.stages) == 3 and cut.num_devices == 2 and cut.shares_devices
    assert cut.stages[-1].ops == (4,)
    times = [own.predict(candidate, prob).metrics.iteration_s for candidate in (plan, cut)]
    assert times[1] < times[0] * 0.9


@pytest.mark.parametrize("seed", range(25))
def test_never_worse_than_without_and_always_valid(seed: int) -> None:
    prob = (
        random_problem(seed, max_ops=8, max_devices=4) if seed % 2 else problem(two_towers(random.Random(seed).randint(1, 4)), 2, 8)
    )
    shared, apart, chain = (
        strategy(planner) for planner in (GraphPipe(share_devices=True), GraphPipe(), Sequential(replication=False))
    )
    try:
        plan = shared.plan(prob)
    except Infeasible:
        with pytest.raises(Infeasible):
            apart.plan(prob)
        return
    assert plan.stages == shared.plan(prob).stages
    took = shared.predict(plan, prob).metrics.iteration_s
    for other in (apart, chain):
        with contextlib.suppress(Infeasible):
            assert took <= other.predict(other.plan(prob), prob).metrics.iteration_s * (1 + 1e-9)
