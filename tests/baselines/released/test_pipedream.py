import pytest

from baselines.released.pipedream import PipeDreamOptimizer, published_plan
from gpp.cluster import flat
from gpp.cost.models.constant import Constant
from gpp.cost.problem import Problem
from gpp.planners.chains.downsets import Budget, all_states
from gpp.planners.chains.pipedream import PipeDream
from tests.support.graphs import two_towers
from tests.support.long import thinned
from tests.support.problems import run
from tests.support.published import PIPEDREAM, PIPEDREAM_BRANCHES, agrees, pipedream_s, profile


@pytest.mark.parametrize(("name", "machines"), [(name, k) for name, row in PIPEDREAM.items() for k in row])
def test_values_of_the_released_optimizer(name, machines):
    graph = profile(name)
    plan = published_plan(graph, machines, 1e9)
    assert agrees(plan.value_s, PIPEDREAM[name][machines])
    assert sum(count for _, count in plan.stages) == machines
    # GNMT has three sources: the tool searches from the first and takes the rest along.
    assert pipedream_s(graph, list(plan.stages), 1e9) == pytest.approx(plan.value_s, rel=1e-9)


@pytest.mark.parametrize(("name", "linear"), list(PIPEDREAM_BRANCHES))
@pytest.mark.parametrize("ending", thinned([".piper.json", ".graph.txt", ".json"], 3))
def test_values_on_branches_in_every_format(name, linear, ending):
    graph = profile(name + ending)
    for machines, printed in zip((4, 8, 16, 32), PIPEDREAM_BRANCHES[name, linear], strict=False):
        plan = published_plan(graph, machines, 25e9, linear=linear)
        assert agrees(plan.value_s, printed), machines
        assert pipedream_s(graph, list(plan.stages), 25e9) == pytest.approx(plan.value_s, rel=1e-9)


def test_values_of_the_hierarchy_and_without_transfers():
    """8 machines inside a server at 10 GB/s, 2 servers: worse than 16 on one slow network, as whole servers must be taken."""
    graph = profile("pipedream_vgg16")
    assert agrees(published_plan(graph, [8, 2], [1e10, 1e9]).value_s, ".0838")
    assert published_plan(graph, 4, 1e9, compression=None).value_s <= published_plan(graph, 4, 1e9).value_s


def test_traps_of_the_released_optimizer():
    graph = profile("pipedream_vgg16")
    # The last stage's memory is not checked: with one byte, data parallelism over all machines is left.
    plan = published_plan(graph, 8, 1e9, memory_bytes=1.0)
    assert [count for _, count in plan.stages] == [8]
    # Only what the first source reaches is searched.
    reached = {op for ops, _ in published_plan(two_towers(3), 2, 1e9).stages for op in ops}
    assert reached == set(range(7)) and len(all_states(two_towers(3), 100, Budget("x", 60, 1e9))) == 17


def test_compatible_plans_the_released_optimizers_plan():
    graph = profile("b2x16")
    problem = Problem(
        graph=graph,
        cluster=flat(num_devices=4, bandwidth_bytes_per_s=25e9, memory_bytes=1e12),
        cost=Constant(),
        minibatch_size=64,
    )
    plan, _ = run(PipeDream(compatible=True, released=PipeDreamOptimizer()), problem)
    assert plan.objective is not None and round(plan.objective.value_s, 5) == 0.12597
    published = published_plan(graph, 4, 25e9)
    assert [(stage.ops, len(stage.devices)) for stage in plan.stages] == list(published.stages)
