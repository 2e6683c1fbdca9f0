"""Memory policies as a part of strategies: what planners propose is made to fit, whichever planner it is."""

import random
from dataclasses import replace

import pytest

from gpp import GraphPipe, NoFlush, OneFOneB, PipeDream2BW, PipeOptim, Piper, Plan, Sequential, Stash, Strategy
from gpp.cost.problem import Problem
from gpp.errors import Infeasible, InvalidPlan
from gpp.graph.op_graph import Op, OpGraph, Param, Tensor
from gpp.mechanisms.marks.policies import Auto, Offload, Recompute
from gpp.mechanisms.marks.stage import marked, marks_of
from gpp.memory import AbstractMemory, Keep, _with_fewer
from gpp.plan.build import make_plan
from gpp.planners.base import AbstractPlanner
from gpp.planners.bounds.lower_bound import lower_bound
from tests.support.long import thinned
from tests.support.problems import cluster, random_partition, random_problem

SPARING: tuple[AbstractMemory, ...] = (Recompute(), Offload(), Auto(), Auto(selection="capuchin"), Recompute(selection="all"))


def with_memory(problem: Problem, memory_bytes: float, host_bandwidth: float | None = 1e9) -> Problem:
    devices = tuple(
        replace(device, memory_bytes=memory_bytes, host_bandwidth_bytes_per_s=host_bandwidth) for device in problem.cluster.devices
    )
    return replace(problem, cluster=replace(problem.cluster, devices=devices))


def tight(seed: int) -> Problem:
    """A random problem on devices that hold a part of what the fastest chain would keep."""
    rng = random.Random(seed)
    problem = random_problem(seed, max_ops=6, max_devices=3)
    problem = replace(problem, optimizer_state_factor=0.0, minibatch_size=4 * problem.minibatch_size)
    strategy = synchronous(Sequential(), Keep())
    endless = strategy.posed(with_memory(problem, 1e18))
    bills = (plan := strategy.plan(endless)).bills(endless)
    fixed = max(bill.static_bytes for bill in bills)
    most = max(bill.memory.peak(stage.ahead) for bill, stage in zip(bills, plan.stages, strict=True))
    return with_memory(problem, fixed + rng.choice([0.15, 0.3, 0.6]) * (most - fixed), rng.choice([None, 1e8, 1e10]))


def synchronous(planner: AbstractPlanner, memory: AbstractMemory) -> Strategy:
    return Strategy(name="test", planner=planner, schedule=OneFOneB(), memory=memory)


def planned(strategy: Strategy, problem: Problem) -> tuple[Plan, float] | None:
    try:
        plan = strategy.plan(problem)
    except Infeasible:
        return None
    strategy.check(plan, problem)
    return plan, strategy.predict(plan, problem, record=False).metrics.iteration_s


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize("memory", thinned(SPARING, 5), ids=lambda memory: f"{memory.name} {memory.selection}")
def test_any_planner_takes_any_policy(memory: AbstractMemory, seed: int) -> None:
    """A plan fits, is never slower than one that keeps everything, and never faster than the bound."""
    problem = tight(seed)
    bound = lower_bound(problem, spares=True)
    for planner in (GraphPipe(), Sequential(), Piper(), PipeDream2BW()):
        kept, spared = planned(synchronous(planner, Keep()), problem), planned(synchronous(planner, memory), problem)
        if spared is None:
            assert kept is None
            continue
        plan, seconds = spared
        assert kept is None or seconds <= kept[1] * (1 + 1e-9)
        own = bound.of(plan)
        assert own is None or seconds >= own.iteration_s * (1 - 1e-9)
        assert all(set(marks_of(stage).recompute) | set(marks_of(stage).offload) <= set(stage.ops) for stage in plan.stages)
        assert "recompute" in memory.ways or not any(marks_of(stage).recompute for stage in plan.stages)
        moves = "offload" in memory.ways and problem.cluster.devices[0].host_bandwidth_bytes_per_s is not None
        assert moves or not any(marks_of(stage).offload for stage in plan.stages)


def test_policies_fit_what_keeping_does_not() -> None:
    """Over the same problems; else the test above would compare nothing."""
    gained = dict.fromkeys(("recompute", "offload", "auto"), 0)
    for seed in range(3):
        problem = tight(seed)
        kept = planned(synchronous(Sequential(), Keep()), problem)
        for memory in (Recompute(), Offload(), Auto()):
            found = planned(synchronous(Sequential(), memory), problem)
            gained[memory.name] += found is not None and (kept is None or found[1] < kept[1] * (1 - 1e-6))
    assert gained["recompute"] > 0 and gained["auto"] >= gained["recompute"]


def test_a_plan_that_fits_is_the_planners_own() -> None:
    problem = with_memory(random_problem(3, max_ops=8, max_devices=3), 1e15)
    kept, spared = (planned(synchronous(GraphPipe(), memory), problem) for memory in (Keep(), Auto()))
    assert kept is not None and spared is not None and spared[1] == pytest.approx(kept[1], rel=1e-3)
    assert not any(marks_of(stage).recompute or marks_of(stage).offload for stage in spared[0].stages)


def test_nothing_is_computed_again_with_other_weights() -> None:
    """Where a backward uses other weights than its forward did, operators that read trained weights are left alone."""
    problem = tight(4)
    graph = problem.graph
    for weights, may in ((Stash(), True), (PipeOptim(), False)):
        strategy = Strategy(
            name="test", planner=Sequential(replication=False), schedule=NoFlush(), weights=weights, memory=Recompute()
        )
        plan = strategy.plan(with_memory(problem, 1e15))
        first = next(s for s in plan.stages if s.ahead > 1)
        trained = tuple(op for op in first.ops if graph.trained_by[op])
        with_marks = replace(plan, stages=tuple(marked(s, recompute=trained) if s is first else s for s in plan.stages))
        changes = weights.changes(plan.position(plan.stages.index(first)))
        assert trained and changes is not may
        if may:
            strategy.check(with_marks, with_memory(problem, 1e15))
        else:
            with pytest.raises(InvalidPlan, match=r"computes operators .* again .* uses other weights than the forward did"):
                strategy.check(with_marks, with_memory(problem, 1e15))


def test_what_fits_in_no_way_is_said() -> None:
    with pytest.raises(Infeasible, match=r"even with strategy\.memory=recompute"):
        synchronous(Sequential(), Recompute()).plan(with_memory(random_problem(3, max_ops=5, max_devices=2), 10.0))


def test_fewer_micro_batches_are_held_where_that_costs_less() -> None:
    """A first stage of ten times the second one's time: computing it again costs a third of a step, holding one less a tenth."""
    ops = tuple(
        Op(name=f"o{i}", forward_flops=work, backward_flops=2 * work, saved_bytes=100, params=(f"w{i}",))
        for i, work in enumerate((1e10, 1e9))
    )
    tensor = Tensor(name="t", producer=0, consumers=(1,), bytes_per_sample=1, differentiable=True)
    graph = OpGraph(name="g", ops=ops, tensors=(tensor,), params=tuple(Param(name=f"w{i}", num_bytes=4) for i in range(2)))
    problem = with_memory(replace(random_problem(0, max_ops=3, max_devices=2), graph=graph), 1e18, None)
    problem = replace(problem, cluster=cluster(2), minibatch_size=16, microbatch_size=1, optimizer_state_factor=0.0)
    strategy = synchronous(Sequential(replication=False), Keep())
    plan = make_plan(problem, "test", [(1, 1), (2, 1)], 1)
    assert [stage.ahead for stage in plan.stages] == [2, 1]
    static = plan.bills(strategy.posed(problem))[0].memory.peak(0)
    small = strategy.posed(with_memory(problem, static + 1.5 * plan.bills(strategy.posed(problem))[0].microbatch_bytes, None))

    def seconds(made: Plan, of: Problem) -> float:
        return strategy.predict(made, of, record=False).metrics.iteration_s

    again, fewer = Recompute().fastest(plan, small, seconds), Auto().fastest(plan, small, seconds)
    assert again is not None and marks_of(again.stages[0]).recompute and again.stages[0].ahead == 2
    assert fewer is not None and not marks_of(fewer.stages[0]).recompute and fewer.stages[0].ahead == 1
    fully = seconds(plan, small)
    assert fully < seconds(fewer, small) == pytest.approx(1.1 * fully, rel=0.02)
    assert seconds(again, small) == pytest.approx(4 / 3 * fully, rel=0.02)


def test_stages_that_hold_fewer_never_wait_for_each_other() -> None:
    """Random graphs of stages, random numbers: what feeds a stage holds as many micro-batches at least, and every program runs."""
    fewer, strategy = 0, synchronous(GraphPipe(), Auto())
    for seed in range(40):
        rng = random.Random(seed)
        problem = strategy.posed(replace(random_problem(seed, max_ops=8, max_devices=6), minibatch_size=8))
        masks = random_partition(problem.graph, rng.randint(1, min(problem.graph.num_ops, problem.cluster.num_devices)), rng)
        plan = make_plan(problem, "test", [(mask, 1) for mask in masks], 1)
        made = _with_fewer(plan, {s: rng.randint(0, 3) for s in range(len(masks)) if rng.random() < 0.5})
        fewer += made != plan
        assert all(0 < new.in_flight <= old.in_flight for new, old in zip(made.stages, plan.stages, strict=True))
        strategy.lower(made, problem)
        predicted = strategy.predict(made, problem).metrics
        assert all(samples <= made.stages[s].in_flight for s, samples in predicted.max_in_flight_samples.items())
    assert fewer > 8
