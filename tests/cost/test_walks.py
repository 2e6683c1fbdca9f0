"""Bills against walks: all micro-batches of a mini-batch in flight, and operators that are discarded or copied."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from gpp.cost.models.analytical import Analytical
from gpp.cost.problem import Problem
from gpp.cost.stage import StageCost, stage_amounts, stage_bytes
from gpp.graph.op_graph import Op, OpGraph, Param, Tensor
from gpp.mechanisms.marks.choices import Marking
from gpp.stage import Stage
from tests.checks.memory import random_graph
from tests.oracle.liveness import Walk, keepers_of
from tests.support.problems import cluster


def walk(graph: OpGraph, count: int, factor: float) -> float:
    """The most bytes at a time in `count` backwards, one sample each, of a chain that keeps everything."""
    sizes = [sum(graph.param_of[name].num_bytes for name in op.params) for op in graph.ops]
    there = sum(sizes) * (1 + factor) + count * sum(op.saved_bytes for op in graph.ops)
    sums, most = [0] * len(sizes), 0.0
    for _ in range(count):
        for v, op in reversed([*enumerate(graph.ops)]):
            # A gradient is made: it is the sum, or is added to it and let go of.
            most = max(most, there + sum(sums) + op.transient_bytes + sizes[v])
            sums[v] = sizes[v]
            there -= op.saved_bytes
    return most


@pytest.mark.parametrize("seed", range(20))
def test_sums_of_gradients_are_not_there_before_the_first_backward(seed: int) -> None:
    rng = random.Random(seed)
    n, count, factor = rng.randint(1, 5), rng.randint(1, 4), rng.choice([0.0, 2.0])
    params = tuple(Param(name=f"w{i}", num_bytes=rng.choice([1, 20, 200])) for i in range(n))
    ops = tuple(
        Op(
            name=f"op{i}",
            saved_bytes=float(rng.randint(5, 60)),
            transient_bytes=float(rng.randint(5, 60)),
            fixed_bytes=float(params[i].num_bytes),
            backward_flops=1.0,
            params=(f"w{i}",),
        )
        for i in range(n)
    )
    tensors = tuple(Tensor(name=f"t{i}", producer=i, consumers=(i + 1,), bytes_per_sample=5.0) for i in range(n - 1))
    graph = OpGraph(name="chain", ops=ops, tensors=tensors, params=params)
    problem = Problem(graph=graph, cluster=cluster(2), cost=Analytical(), minibatch_size=count, optimizer_state_factor=factor)
    stage = Stage(ops=tuple(range(n)), devices=(0,), microbatch_size=1, in_flight=count)
    # Never below weights, sums and all that is held, whether or not these meet.
    held = stage_bytes(problem, stage)._replace(transient=0.0).peak(count)
    assert StageCost.of(problem, stage).memory.peak(count) == pytest.approx(max(walk(graph, count, factor), held), rel=1e-12)
    if count > 1:
        fewer = replace(stage, in_flight=count - 1)
        assert StageCost.of(problem, fewer).memory == stage_bytes(problem, fewer)


def graph_of(rng: random.Random, n: int, chain: bool) -> tuple[OpGraph, dict[int, float]]:
    """A random graph, and the bytes that each operator keeps beside its tensors."""
    graph = random_graph(rng, n, chain=chain)
    hidden = {i: op.saved_bytes for i, op in enumerate(graph.ops)}
    least = dict.fromkeys(hidden, 0.0)
    for tensor in graph.tensors:
        hidden[tensor.producer] -= tensor.bytes_per_sample * tensor.saved
        # While an operator runs back, there are at least the gradients of what it makes and of what it reads.
        for i in (tensor.producer, *tensor.consumers):
            least[i] += tensor.bytes_per_sample
    ops = tuple(
        replace(op, transient_bytes=least[i] + rng.randint(0, 9), params=(), fixed_bytes=0.0) for i, op in enumerate(graph.ops)
    )
    return replace(graph, ops=ops, params=()), hidden


def marked(rng: random.Random, stage_ops: tuple[int, ...]) -> Marking:
    """(K)ept, (r)ecomputed, (b)oundaries of that, (o)ffloaded."""
    ways = [rng.choice("kkrrbo") for _ in stage_ops]
    return Marking(*(tuple(op for op, way in zip(stage_ops, ways, strict=True) if way in named) for named in ("rb", "o", "b")))


@pytest.mark.parametrize("seed", range(150))
def test_no_walk_takes_more_than_the_bill_says(seed: int) -> None:
    rng = random.Random(seed)
    n = rng.randint(2, 9)
    graph, hidden = graph_of(rng, n, chain=seed % 3 == 0)
    problem = Problem(graph=graph, cluster=cluster(2), cost=Analytical(), minibatch_size=4)
    low = rng.randint(0, n - 1)
    ops = tuple(range(low, rng.randint(low + 1, n)))
    marks = marked(rng, ops)
    if not any(marks):
        return
    # Less than the mini-batch is in flight, so that there are gradients already (`gpp.cost.known`).
    stage = marks.on(Stage(ops=ops, devices=(0,), microbatch_size=1, in_flight=3))
    bill, amounts = StageCost.of(problem, stage), stage_amounts(problem, stage)
    times = problem.op_times(1, 0)
    for all_keep in (True, False, False):
        keepers = keepers_of(graph, ops, None if all_keep else rng)
        again, moved, ends = map(frozenset, marks)
        walk = Walk(graph, ops, again, ends, moved, keepers, hidden).run()
        assert (amounts.kept, amounts.moved) == pytest.approx((walk.kept, walk.moved), abs=1e-9)
        assert walk.peak <= walk.kept + walk.moved + bill.transient_bytes + 1e-9
        plain = problem.stage_times(ops, 1, (0,))
        assert bill.backward_s - plain[1] == pytest.approx(sum(float(times.forward_s[op]) for op in walk.again), abs=1e-12)
