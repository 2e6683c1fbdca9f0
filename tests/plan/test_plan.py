from dataclasses import replace
from itertools import pairwise

import pytest

from gpp.errors import Infeasible, InvalidPlan
from gpp.graph.op_graph import Op, OpGraph, Tensor, mask_of
from gpp.graph.order import kahn
from gpp.graph.random_graphs import random_dag
from gpp.plan.build import make_plan
from gpp.plan.in_flight import required_in_flight
from gpp.plan.plan import Plan
from gpp.serialization import from_json, to_json
from gpp.stage import Stage
from tests.support.bills import peak_bytes
from tests.support.graphs import chain, diamond, problem, within

PROBLEM = problem(diamond(), 4, 8)
PLAN = make_plan(PROBLEM, "test", [(1 << op, 1) for op in range(4)], 2)


def with_stage(index, **change):
    stages = list(PLAN.stages)
    stages[index] = replace(stages[index], **change)
    return replace(PLAN, stages=tuple(stages))


def test_a_plan_of_the_diamond():
    PLAN.validate(PROBLEM)
    assert PLAN.edges == ((0, 1), (0, 2), (1, 3), (2, 3))
    assert PLAN.depth == 3
    assert PLAN.distance_to_sink == (3, 2, 2, 1)
    assert PLAN.successors[0] == (1, 2)
    assert PLAN.predecessors[3] == (1, 2)
    assert PLAN.stage_of_device == {0: 0, 1: 1, 2: 2, 3: 3}
    assert [stage.in_flight for stage in PLAN.stages] == [6, 4, 4, 2]


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (replace(PLAN, graph_fingerprint="other"), "another graph"),
        (replace(PLAN, minibatch_size=16), "minibatch_size=16"),
        (with_stage(1, ops=(1, 2)), "operator 2 is in stages 1 and 2"),
        (with_stage(1, ops=()), "no operators or no devices"),
        (with_stage(1, devices=()), "no operators or no devices"),
        (with_stage(3, ops=(3, 4)), r"operators \[4\] are in no stage or do not exist"),
        (replace(PLAN, stages=PLAN.stages[:3], edges=PLAN.edges[:2]), r"operators \[3\] are in no stage"),
        (with_stage(1, devices=(1, 1)), "different devices"),
        (with_stage(1, devices=(4,)), "different devices"),
        (replace(PLAN, edges=((1, 0), *PLAN.edges[1:])), "does not go forward"),
        (replace(PLAN, edges=(*PLAN.edges, (3, 4))), "does not go forward"),
        (with_stage(0, microbatch_size=9, in_flight=9), "must be in 1..8"),
        (with_stage(0, microbatch_size=0), "must be in 1..8"),
        (with_stage(0, in_flight=5), "a multiple of it"),
        (with_stage(0, in_flight=0), "a multiple of it"),
        (with_stage(0, microbatch_size=1, in_flight=4, devices=(0, 3)), "2 replicas share out 1 samples"),
        (replace(PLAN, edges=PLAN.edges[:3]), "no such edge"),
    ],
)
def test_every_violation_is_named(plan, message):
    with pytest.raises(InvalidPlan, match=message):
        plan.validate(PROBLEM)


def test_stages_that_share_a_device_share_its_memory():
    shared = with_stage(1, devices=(0,))
    assert not PLAN.shares_devices
    assert shared.shares_devices
    assert shared.stages_of_device == {0: (0, 1), 2: (2,), 3: (3,)}
    assert shared.num_devices == 3
    held = {s: stage.in_flight for s, stage in enumerate(PLAN.stages)}
    apart, together = PLAN.device_memory(PROBLEM, held), shared.device_memory(PROBLEM, held)
    assert together == {0: apart[0] + apart[1], 2: apart[2], 3: apart[3]}
    room = max(apart.values())
    assert together[0] > room
    tight = within(PROBLEM, room)
    PLAN.validate(tight)
    with pytest.raises(Infeasible, match="stages 0, 1 together need"):
        shared.validate(tight)


def test_not_convex():
    of = problem(chain(3), 2, 8)
    stages = (
        Stage(ops=(0, 2), devices=(0,), microbatch_size=2, in_flight=4),
        Stage(ops=(1,), devices=(1,), microbatch_size=2, in_flight=2),
    )
    plan = Plan(planner="test", stages=stages, edges=((0, 1),), minibatch_size=8, graph_fingerprint=of.graph.fingerprint)
    with pytest.raises(InvalidPlan, match="stage 0 is not convex"):
        plan.validate(of)
    with pytest.raises(InvalidPlan, match="cycle"):
        make_plan(of, "test", [(0b101, 1), (0b010, 1)], 2)


def test_too_little_memory_names_the_worst_stage():
    plan = make_plan(PROBLEM, "test", [(1 << op, 1) for op in range(4)], 2)
    need = [peak_bytes(PROBLEM, s.ops, s.microbatch_size, 1, s.in_flight) for s in plan.stages]
    small = problem(diamond(), 4, 8, memory_bytes=max(need) - 1)
    with pytest.raises(Infeasible, match=f"stage {need.index(max(need))} needs"):
        plan.validate(small)
    plan.validate(problem(diamond(), 4, 8, memory_bytes=max(need)))


def test_order_edges_make_a_chain():
    plan = make_plan(PROBLEM, "test", [(1 << op, 1) for op in range(4)], 2, chain=True)
    plan.validate(PROBLEM)
    assert (1, 2) in plan.edges
    assert plan.depth == 4
    assert plan.edge_tensors(PROBLEM.graph)[1, 2] == ()
    assert [stage.in_flight for stage in plan.stages] == [8, 6, 4, 2]


def test_skip_connections_carry_their_tensor_past_stages():
    ops = tuple(Op(name=f"op{i}") for i in range(3))
    tensors = (
        Tensor(name="skip", producer=0, consumers=(1, 2), bytes_per_sample=4.0),
        Tensor(name="next", producer=1, consumers=(2,), bytes_per_sample=4.0),
    )
    of = problem(OpGraph(name="g", ops=ops, tensors=tensors), 3, 4)
    plan = make_plan(of, "test", [(1, 1), (2, 1), (4, 1)], 1)
    plan.validate(of)
    assert {edge: [t.name for t in found] for edge, found in plan.edge_tensors(of.graph).items()} == {
        (0, 1): ["skip"],
        (0, 2): ["skip"],
        (1, 2): ["next"],
    }


@pytest.mark.parametrize(
    ("b", "successor", "expected"),
    [(4, None, 4), (4, (4, 4, 1), 8), (2, (4, 4, 1), 8), (1, (1, 1, 1), 2), (4, (2, 2, 1), 8), (4, (8, 2, 1), 16)],
)
def test_in_flight(b, successor, expected):
    assert required_in_flight(b, 1, successor) == expected


@pytest.mark.parametrize("seed", range(10))
def test_random_cuts_of_random_graphs_are_valid_and_read_back_equal(seed):
    of = problem(random_dag(24, seed), 6, 8)
    cuts = [0, 3, 7, 12, 15, 20, 24]  # intervals of a topological order are convex and make no cycle
    plan = make_plan(of, "test", [(mask_of(range(a, b)), 1) for a, b in pairwise(cuts)], [2, 4, 1, 8, 2, 4])
    plan.validate(of)
    assert from_json(Plan, to_json(plan)) == plan
    assert plan.num_devices == 6


def test_topological_order_breaks_ties_by_key():
    assert kahn([{2}, {2}, set()], key=[5, 1, 0]) == [1, 0, 2]


def test_more_replicas_than_the_problem_allows():
    of = problem(chain(2), 4, 8, max_replicas=2)
    make_plan(of, "test", [(1, 2), (2, 1)], 2).validate(of)
    with pytest.raises(InvalidPlan, match="stage 0 has 3 replicas, and may have 2 at most"):
        make_plan(of, "test", [(1, 3), (2, 1)], 4).validate(of)
