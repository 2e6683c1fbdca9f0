"""The fast prediction of searches equals the exact one, the simulator on the lowered program."""

import random
from dataclasses import dataclass, replace

import pytest

from gpp import (
    Device,
    Even,
    GPipe,
    Link,
    NoFlush,
    OneFOneB,
    Split1F1B,
    Stash,
    Strategy,
    ZeroBubbleH1,
    ZeroBubbleH2,
    uniform,
)
from gpp.cost.models.constant import Constant
from gpp.cost.problem import Problem
from gpp.cost.regime import Regime
from gpp.graph.op_graph import Op, OpGraph, Param, Tensor
from gpp.plan.build import make_plan
from gpp.program.program import check_program, reduce_groups
from gpp.simulate.recurrence import can_score, score
from gpp.simulate.simulator import simulate
from tests.support.graphs import DEVICE, in_halves
from tests.support.long import thinned
from tests.support.programs import lower

NODES = uniform(
    name="c",
    num_nodes=3,
    devices_per_node=8,
    device=DEVICE,
    intra_node=Link(latency_s=0.1, bandwidth_bytes_per_s=8),
    inter_node=Link(latency_s=0.7, bandwidth_bytes_per_s=3),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Updates(Constant):
    """Updates take time too, other ones on every stage."""

    def update_s(self, num_bytes: float, device: Device) -> float:
        return 0.05 * num_bytes


def random_dag(rng: random.Random, num_ops: int) -> OpGraph:
    tensors = []
    for op in range(1, num_ops):
        for producer in sorted(rng.sample(range(op), k=min(op, rng.choice([1, 1, 2])))):
            tensors.append(
                Tensor(
                    name=f"t{producer}_{op}",
                    producer=producer,
                    consumers=(op,),
                    bytes_per_sample=rng.uniform(0, 4),
                    differentiable=rng.random() < 0.8,
                )
            )
    params = tuple(Param(name=f"w{i}", num_bytes=rng.randint(1, 50)) for i in range(num_ops))
    # One weight tied between the first and the last operator.
    ops = tuple(
        Op(
            name=f"o{i}",
            forward_flops=rng.uniform(0.5, 2),
            backward_flops=rng.uniform(0.5, 3),
            saved_bytes=rng.uniform(1, 9),
            params=(f"w{i}",) + (("w0",) if i == num_ops - 1 else ()),
        )
        for i in range(num_ops)
    )
    return OpGraph(name="random", ops=ops, tensors=tuple(tensors), params=params)


@pytest.mark.parametrize("seed", thinned(range(100), 12))
def test_score_equals_simulation(seed: int) -> None:
    rng = random.Random(seed)
    num_ops = rng.randint(1, 8)
    graph = random_dag(rng, num_ops)
    schedule = rng.choice([OneFOneB(), GPipe(), Split1F1B(), ZeroBubbleH1(), ZeroBubbleH2()])
    graph = in_halves(graph) if schedule.holds.parts else graph
    batch = rng.choice([24, 24, 240, 1200])  # of the long ones most rounds are skipped
    problem = Problem(
        graph=graph,
        cluster=NODES,
        cost=rng.choice([Constant, Updates])(fixed_s=0.2),
        minibatch_size=batch,
        global_norm=rng.random() < 0.3,
        regime=Regime(holds=schedule.holds),
    )
    b = rng.choice([2, 4, 6])
    plan = make_plan(problem, "test", [(1 << op, rng.randint(1, min(3, b))) for op in range(num_ops)], b, chain=rng.random() < 0.3)
    plan.validate(problem)
    warmups = [schedule.warmup(plan, s, batch // b) for s in range(len(plan.stages))]
    assert can_score(plan, warmups)
    program = lower(plan, graph, schedule, global_norm=problem.global_norm)
    check_program(program, reduce_groups(plan, graph))
    slow = simulate(program, plan, problem).metrics
    fast = score(plan, problem, warmups).metrics
    assert fast.iteration_s == pytest.approx(slow.iteration_s, rel=1e-12)
    assert fast.bubble_fraction == pytest.approx(slow.bubble_fraction, abs=1e-12)
    assert fast.peak_memory_bytes == slow.peak_memory_bytes
    assert fast.communication_bytes == pytest.approx(slow.communication_bytes, abs=1)
    assert fast.max_in_flight_samples == slow.max_in_flight_samples


@pytest.mark.parametrize("seed", [0, 22, 34, 53, 80, 97, 515, 794])
def test_a_pipeline_that_does_not_drain_is_scored_as_simulated(seed: int) -> None:
    """Sums of replicas that do not run alike, several micro-batches an update, steps that take turns, stages that run ahead."""
    rng = random.Random(seed)
    graph = random_dag(rng, num_ops := rng.randint(1, 8))
    if rng.random() < 0.8:
        graph = replace(graph, ops=tuple(replace(op, params=op.params[:1]) for op in graph.ops))
    count, b = rng.choice([1, 1, 1, 2, 3, 4, 8]), rng.choice([2, 4, 6])
    strategy = Strategy(name="test", planner=Even(), schedule=NoFlush(), weights=Stash())
    cost = rng.choice([Constant, Updates])(fixed_s=0.2)
    problem = strategy.posed(Problem(graph=graph, cluster=NODES, cost=cost, minibatch_size=b * count))
    plan = make_plan(problem, "test", [(1 << op, rng.randint(1, min(3, b))) for op in range(num_ops)], b, chain=rng.random() < 0.3)
    strategy.check(plan, problem)
    fast, slow = (strategy.predict(plan, problem, record=record).metrics.iteration_s for record in (False, True))
    assert fast == pytest.approx(slow, rel=1e-9)
