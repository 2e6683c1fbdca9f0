"""Stages with all micro-batches of a mini-batch in flight, against a walk through their backwards."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from gpp.cost.models.analytical import Analytical
from gpp.cost.problem import Problem
from gpp.cost.stage import StageCost, stage_bytes
from gpp.graph.op_graph import Op, OpGraph, Param, Tensor
from gpp.stage import Stage
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
