"""The bill of discarded and copied operators against a walk that follows every tensor."""

from __future__ import annotations

import random

import pytest

from gpp.cost.models.analytical import Analytical
from gpp.cost.problem import Problem
from gpp.cost.stage import StageCost, stage_amounts
from gpp.graph.op_graph import Op, OpGraph, Tensor
from gpp.mechanisms.marks.choices import Marking
from gpp.stage import Stage
from tests.oracle.liveness import Walk, keepers_of
from tests.support.problems import cluster


def graph_of(rng: random.Random, n: int, chain: bool) -> tuple[OpGraph, dict[int, float]]:
    """Operators with hidden storages and transients, and the tensors between them; an operator may keep nothing."""
    tensors = []
    for i in range(n):
        readers = [i + 1] if chain else sorted(rng.sample(range(i + 1, n), min(n - 1 - i, rng.choice([1, 1, 1, 2, 3]))))
        if i + 1 < n:
            size = float(rng.randint(1, 9))
            tensors.append(
                Tensor(
                    name=f"t{i}",
                    producer=i,
                    consumers=tuple(readers),
                    bytes_per_sample=size,
                    saved=rng.random() < 0.6,
                    differentiable=rng.random() < 0.9,
                )
            )
    hidden = {i: float(rng.choice([0, 0, 3, 8, 20])) for i in range(n)}
    own = {i: hidden[i] + sum(t.bytes_per_sample for t in tensors if t.producer == i and t.saved) for i in range(n)}
    ops = tuple(
        Op(
            name=f"op{i}",
            forward_flops=rng.uniform(1, 5),
            backward_flops=rng.uniform(1, 9),
            saved_bytes=own[i],
            # While it runs back, there are at least the gradients of what it makes and of what it reads.
            transient_bytes=sum(t.bytes_per_sample for t in tensors if t.producer == i or i in t.consumers) + rng.randint(0, 9),
        )
        for i in range(n)
    )
    return OpGraph(name="random", ops=ops, tensors=tuple(tensors)), hidden


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
