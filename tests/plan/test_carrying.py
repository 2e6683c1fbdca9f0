"""What messages carry: a tensor goes to a device once."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from gpp import GPipe, OneFOneB, Plan
from gpp.cost.problem import Problem
from gpp.cost.regime import Regime
from gpp.graph.op_graph import OpGraph
from gpp.plan.build import make_plan
from gpp.program.program import check_program
from gpp.simulate.simulator import simulate
from gpp.stage import EdgeTensors
from tests.support.graphs import graph, problem
from tests.support.programs import lower

READ_BY_ALL = graph(4, [(0, 1), (0, 2), (0, 3), (1, 2), (2, 3)])
"""A chain whose first operator is read by all others."""


def placed(of: OpGraph, devices: list[tuple[int, ...]], sizes: int | list[int] = 1, **more) -> tuple[Plan, Problem]:
    prob = problem(of, 1 + max(max(own) for own in devices), 8)
    parts = [(1 << op, len(own)) for op, own in enumerate(devices)]
    return make_plan(prob, "test", parts, sizes, ordered=True, placement=devices, **more), prob


def names(plan: Plan, of: OpGraph) -> dict[tuple[int, int], list[str]]:
    return {edge: [tensor.name for tensor in tensors] for edge, tensors in plan.carried(of).items()}


def test_a_stage_gets_a_tensor_from_one_of_its_device_that_it_waits_for() -> None:
    plan, prob = placed(READ_BY_ALL, [(0,), (1,), (0,), (1,)])
    # Stage 2 is where the tensor is made; stage 3 gets it from stage 1.
    assert names(plan, prob.graph) == {(0, 1): ["t0"], (0, 2): ["t0"], (1, 2): ["t1"], (2, 3): ["t2"], (1, 3): ["t0"]}
    assert plan.returning(prob.graph) == set(plan.carried(prob.graph))
    text = lower(plan, prob.graph, OneFOneB()).to_text()
    assert "s0.SF0>s1.d1" in text and "s1.SF0>s3.d1[0:1]@d1" in text and "s0.SF0>s3" not in text
    assert "s3.SB0>s1.d1[0:1]@d1" in text and "s1.SB0>s0.d0" in text and "s3.SB0>s0" not in text


def test_bytes_of_a_step_fall_by_what_went_twice() -> None:
    plan, prob = placed(READ_BY_ALL, [(0,), (1,), (1,), (1,)])
    sent = simulate(lower(plan, prob.graph, OneFOneB()), plan, prob).metrics.communication_bytes
    assert sent == 2 * prob.minibatch_size  # one tensor of a byte a sample, there and back; it was three


@pytest.mark.parametrize(
    ("devices", "sizes"),
    [
        ([(0,), (1,), (2,), (3,)], 1),  # no two on one device
        ([(0,), (1,), (1, 2), (2,)], 2),  # the devices are not the same
        ([(0,), (1, 2), (3,), (1, 2)], [2, 4, 2, 2]),  # replicas cut other samples
        ([(0,), (0,), (0,), (0,)], 1),  # nothing is sent
    ],
)
def test_others_receive_it_themselves(devices: list[tuple[int, ...]], sizes: int | list[int]) -> None:
    plan, prob = placed(READ_BY_ALL, devices, sizes)
    assert plan.carried(prob.graph) == plan.edge_tensors(prob.graph)


def test_branches_get_it_from_the_one_that_holds_more() -> None:
    """0 -> {1, 2 -> 3}: 1 and 2 wait for nothing of each other, and 2 has more samples in flight."""
    fork = graph(4, [(0, 1), (0, 2), (2, 3)])
    plan, _ = placed(fork, [(0,), (1,), (1,), (2,)])
    assert names(plan, fork) == {(0, 2): ["t0"], (2, 1): ["t0"], (2, 3): ["t2"]}
    # Without a gradient nothing would say when its last reader has had it; with sizes of their own, orders might not fit.
    frozen = replace(fork, tensors=tuple(replace(tensor, differentiable=tensor.producer != 0) for tensor in fork.tensors))
    plan, _ = placed(frozen, [(0,), (1,), (1,), (2,)])
    assert plan.carried(frozen) == plan.edge_tensors(frozen)
    plan, _ = placed(fork, [(0,), (1,), (1,), (2,)], [1, 1, 2, 1])
    assert plan.carried(fork) == plan.edge_tensors(fork)


def test_an_order_stays_where_a_tensor_goes_along() -> None:
    """A chain of stages 1 -> 2, which an edge without a tensor keeps in order; 2 gets what 1 has received, and it is frozen."""
    fork = graph(4, [(0, 1), (0, 2), (1, 3), (2, 3)])
    frozen = replace(fork, tensors=tuple(replace(tensor, differentiable=tensor.producer != 0) for tensor in fork.tensors))
    plan, _ = placed(frozen, [(0,), (1,), (1,), (0,)], chain=True)
    assert names(plan, frozen)[1, 2] == ["t0"] and (1, 2) in plan.returning(frozen) and (0, 2) not in plan.carried(frozen)


@pytest.mark.parametrize("schedule", [OneFOneB(), GPipe()], ids=["1f1b", "gpipe"])
@pytest.mark.parametrize("seed", range(6))
def test_no_tensor_goes_twice_and_every_program_runs(seed: int, schedule: OneFOneB | GPipe) -> None:
    """Random plans of one micro-batch size on few devices."""
    rng, handed = random.Random(seed), 0
    for _ in range(20):
        count, devices = rng.randint(3, 8), rng.randint(2, 3)
        of = graph(count, [(a, b) for b in range(1, count) for a in rng.sample(range(b), k=rng.randint(1, min(b, 3)))])
        placement = [(rng.randrange(devices),) for _ in range(count)]
        prob = problem(of, devices, 8, regime=Regime(holds=schedule.holds))
        parts, b = [(1 << op, 1) for op in range(count)], rng.choice([1, 2, 4])
        plan = make_plan(prob, "test", parts, b, ordered=True, placement=placement, chain=rng.random() < 0.3)
        check_program(lower(plan, of, schedule))
        read, sent = plan.edge_tensors(of), plan.carried(of)
        crossing = Counter((t.name, placement[b]) for (a, b), own in sent.items() if placement[a] != placement[b] for t in own)
        assert all(times == 1 for times in crossing.values())
        assert [reads(read, s) for s in range(count)] == [reads(sent, s) for s in range(count)]
        handed += read != sent
    assert handed > 3


def reads(edges: EdgeTensors, stage: int) -> list[str]:
    """What a stage gets from all others."""
    return sorted(tensor.name for (_, t), tensors in edges.items() if t == stage for tensor in tensors)
