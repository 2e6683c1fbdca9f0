import numpy as np
import pytest

from baselines.released.knapsack import changed, changes, squeeze
from baselines.released.piper import PiperPlanner, published_plan
from gpp.cluster import flat
from gpp.cost.models.constant import Constant
from gpp.cost.problem import Problem
from gpp.errors import Infeasible
from gpp.planners.chains.piper import Piper
from tests.support.problems import run, towers
from tests.support.published import GIB, PIPER_BERT, PIPER_BRANCHES, agrees, piper_bytes, piper_s, profile

BERT = {"memory_bytes": 8 * GIB, "bandwidth": 25 * GIB, "num_microbatches": 1920}
BRANCHES = {"memory_bytes": 16e9, "bandwidth": 25e9, "num_microbatches": 64}


@pytest.mark.parametrize("devices", [pytest.param(k, marks=pytest.mark.long) if k > 64 else k for k in PIPER_BERT])
def test_values_of_the_released_planner_on_bert(devices):
    """Recomputation, tensor-parallel degrees 1 to 8, memory that binds."""
    plan = published_plan(profile("piper_bert32a100.json"), devices, **BERT)
    assert agrees(plan.value_s, PIPER_BERT[devices])
    assert sum(stage.replicas * stage.degree for stage in plan.stages) <= devices
    assert any(stage.recompute for stage in plan.stages)


@pytest.mark.parametrize(("name", "linear"), [case for case in PIPER_BRANCHES if case != ("b4x8", False)])
@pytest.mark.parametrize("ending", [".json", ".piper.json"])
def test_values_of_the_released_planner_on_branches(name, linear, ending):
    check_branches(name, linear, ending, (4, 8, 16, 32))


def test_values_on_four_branches_with_all_downsets():
    """6,565 downsets and 4.1 million pairs, for which the released tool takes 34 s."""
    check_branches("b4x8", False, ".json", (4,))


@pytest.mark.long
def test_values_on_four_branches_with_all_downsets_and_more_devices():
    check_branches("b4x8", False, ".json", (8, 16, 32))


def check_branches(name, linear, ending, devices):
    graph = profile(name + ending)
    for k, printed in zip((4, 8, 16, 32), PIPER_BRANCHES[name, linear], strict=True):
        if k in devices:
            plan = published_plan(graph, k, linear=linear, **BRANCHES)
            stages = [(stage.ops, stage.replicas) for stage in plan.stages]
            assert agrees(plan.value_s, printed), k
            assert piper_s(graph, stages, 25e9, 64) == pytest.approx(plan.value_s, rel=1e-9)
            assert piper_bytes(graph, stages) <= 16e9


def test_memory_pressure_as_measured_with_the_released_planner():
    """Two branches of 16 on 8 devices; at 0.8 GB operators 0, 2, 3, 8, 14 and 22 are recomputed."""
    graph = profile("b2x16.piper.json")
    for limit, printed in ((3, ".06423"), (2, ".06658"), (1.5, ".06888"), (1.2, ".07134"), (1, ".07891"), (0.8, ".08454")):
        assert agrees(published_plan(graph, 8, **{**BRANCHES, "memory_bytes": limit * 1e9}).value_s, printed)


def test_more_downsets_than_published_are_refused():
    with pytest.raises(Infeasible, match="40,000 downsets"):
        published_plan(towers(4, 16, fork=True), 4, **BRANCHES)


def test_knapsack_changes_the_cheapest_bytes_first():
    added, saved = np.array([1.0, 1.0, 4.0, 0.0]), np.array([1.0, 2.0, 8.0, 0.0])
    order = changes(added, saved)
    assert order.tolist() == [1, 2, 0]
    members = np.array([[True, True, True, True], [True, False, False, True]])
    for lacking, seconds, ops in ((1.5, 1.0, (1,)), (2.5, 5.0, (1, 2)), (11.0, 6.0, (0, 1, 2))):
        found = squeeze(members, np.zeros(2), np.full(2, lacking), [1], added, saved, np.zeros(4))
        assert found[0, 0] == seconds and changed([0, 1, 2, 3], lacking, order, saved) == ops
        assert found[0, 1] == np.inf
    assert squeeze(members, np.zeros(2), np.full(2, -1.0), [1], added, saved, np.zeros(4)).tolist() == [[0.0, 0.0]]


def test_compatible_plans_the_released_planners_plan():
    graph = profile("b2x16.piper.json")
    problem = Problem(
        graph=graph,
        cluster=flat(num_devices=8, bandwidth_bytes_per_s=25e9, memory_bytes=16e9),
        cost=Constant(),
        minibatch_size=64,
    )
    plan, _ = run(Piper(compatible=True, released=PiperPlanner()), problem)
    assert plan.objective is not None and round(plan.objective.value_s, 7) == 0.0642287
    published = published_plan(graph, 8, **BRANCHES)
    assert [(stage.ops, len(stage.devices)) for stage in plan.stages] == [(s.ops, s.replicas) for s in published.stages]
