"""The bill of a stage against its definition, written down once more, and against all who read it."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from gpp import Analytical, DoubleBuffer, Flush, NoFlush, OneFOneB, PipeOptim, Plan, SpecTrain, Stash
from gpp.cluster import Cluster, Device, Link, uniform
from gpp.cost.amounts import Amounts, StageBytes
from gpp.cost.problem import Problem
from gpp.cost.regime import Regime
from gpp.cost.stage import StageCost, stage_bytes
from gpp.graph.op_graph import Input, Op, OpGraph, Param, Tensor
from gpp.mechanisms.round_robin.stage import IN_TURN
from gpp.plan.build import make_plan
from gpp.program.lower import POSTED_AHEAD
from gpp.program.program import Program
from gpp.program.steady_state import window
from gpp.serialization import from_json, to_json
from gpp.simulate.simulator import simulate
from gpp.stage import Stage
from gpp.weights.base import AbstractWeights, PipelinePosition
from tests.support.programs import lower

POLICIES: list[AbstractWeights] = [
    Flush(), Stash(), Stash(accumulation=None), DoubleBuffer(), PipeOptim(), SpecTrain(), SpecTrain(form=2)
]  # fmt: skip


def random_graph(rng: random.Random) -> OpGraph:
    """Operators with saved activations, some of them without a gradient, and parameters, some frozen, some read twice."""
    n = rng.randint(3, 9)
    params = tuple(Param(name=f"w{i}", num_bytes=rng.randint(1, 50), trainable=rng.random() < 0.7) for i in range(n))
    ops = tuple(
        Op(
            name=f"op{i}",
            forward_flops=rng.uniform(1, 5),
            backward_flops=rng.uniform(1, 9),
            saved_bytes=rng.uniform(0, 20),
            transient_bytes=rng.choice([0.0, rng.uniform(0, 40)]),
            fixed_bytes=rng.choice([0.0, rng.uniform(0, 60)]),
            params=tuple(sorted({f"w{rng.randrange(n)}" for _ in range(rng.randint(0, 2))})),
            inputs=tuple(sorted({rng.choice("xyz") for _ in range(rng.randint(0, 2))})),
        )
        for i in range(n)
    )
    tensors = tuple(
        Tensor(
            name=f"t{i}",
            producer=i,
            consumers=tuple(sorted(rng.sample(range(i + 1, n), rng.randint(1, min(3, n - 1 - i))))),
            bytes_per_sample=rng.uniform(0, 9),
            saved=rng.random() < 0.5,
            differentiable=rng.random() < 0.8,
        )
        for i in range(n - 1)
    )
    inputs = tuple(Input(name=name, bytes_per_sample=rng.uniform(0, 9)) for name in "xyz")
    read = tuple(p for p in params if any(p.name in op.params for op in ops))
    return OpGraph(name="random", ops=ops, tensors=tensors, params=read, inputs=inputs)


def devices(rng: random.Random, count: int) -> Cluster:
    """Devices of two speeds."""
    device = Device(kind="cpu", memory_bytes=1e9, peak_flop_per_s={"float32": 2.0}, memory_bandwidth_bytes_per_s=3.0)
    link = Link(latency_s=0.1, bandwidth_bytes_per_s=50.0)
    whole = uniform(name="test", num_nodes=1, devices_per_node=count, device=device, intra_node=link)
    return replace(whole, devices=tuple(replace(device, speed_factor=rng.choice([0.5, 1.0])) for _ in range(count)))


def random_problem(rng: random.Random, minibatch_size: int = 12) -> Problem:
    weights = rng.choice(POLICIES)
    return Problem(
        graph=random_graph(rng),
        cluster=devices(rng, 6),
        cost=Analytical(),
        minibatch_size=minibatch_size,
        optimizer_state_factor=rng.choice([0.0, 1.0, 2.0]),
        regime=Regime(weights=weights),
    )


def random_stage(rng: random.Random, problem: Problem) -> Stage:
    ops = tuple(sorted(rng.sample(range(problem.graph.num_ops), rng.randint(1, problem.graph.num_ops))))
    count, b, round_robin = rng.randint(1, 3), rng.choice([3, 4, 6]), rng.random() < 0.3
    unit = b * (count if round_robin else 1)
    used = tuple(sorted(rng.sample(range(6), count)))
    return Stage(ops=ops, devices=used, microbatch_size=b, in_flight=unit * rng.randint(1, 4), mechanisms=(IN_TURN,) * round_robin)


def defined_bytes(problem: Problem, stage: Stage, in_flight: int, depth: int | None, *, line: bool = True) -> float:
    """Peak bytes on a device of a stage, operator by operator and tensor by tensor.

    Args:
        line: whether the transients are those of one line for any number of samples.
    """
    graph, own = problem.graph, set(stage.ops)
    samples = stage.microbatch_size if stage.sharing else math.ceil(stage.microbatch_size / len(stage.devices))
    names = {name for op in own for name in graph.ops[op].params}
    trainable = sum(p.num_bytes for p in graph.params if p.name in names and p.trainable)
    total = sum(p.num_bytes for p in graph.params if p.name in names) + trainable * (1 + problem.optimizer_state_factor)
    # The rows of this mini-batch and of the next one.
    for given in graph.inputs:
        total += 2 * problem.minibatch_size * given.bytes_per_sample * any(given.name in graph.ops[op].inputs for op in own)
    if not problem.regime.weights.flushes:
        warmup, m = stage.ahead - 1, problem.minibatch_size // stage.microbatch_size
        m = max(m // len(stage.devices), 1) if stage.sharing else m
        position = PipelinePosition(warmup=warmup, depth=depth or warmup + 1, accumulation=m)
        total += trainable * (problem.regime.weights.copies(position) - 1)
    kept, coming, going = sum(graph.ops[op].saved_bytes for op in own), 0.0, 0.0
    for tensor in graph.tensors:
        inside, outside = own & set(tensor.consumers), set(tensor.consumers) - own
        enters, leaves = tensor.producer not in own and inside, tensor.producer in own and outside
        if enters or (leaves and not tensor.saved):
            kept += tensor.bytes_per_sample
        if tensor.differentiable:
            coming, going = coming + tensor.bytes_per_sample * bool(enters), going + tensor.bytes_per_sample * bool(leaves)
    # What is there at each operator, beyond what all save: those that follow from it have freed theirs.
    slopes = {
        op: graph.ops[op].transient_bytes - sum(graph.ops[w].saved_bytes for w in own if graph.descendants[op] >> w & 1)
        for op in own
    }
    for tensor in graph.tensors:
        if tensor.producer in own and set(tensor.consumers) - own and tensor.differentiable and not tensor.saved:
            slopes[tensor.producer] -= tensor.bytes_per_sample
    # The gradient of a weight that is read again waits, and a new sum is made of it and of the next one.
    fixed = {op: graph.ops[op].fixed_bytes for op in own}
    for param in graph.params:
        readers = [op for op in own if param.name in graph.ops[op].params and param.trainable]
        for op in own:
            if min(readers, default=op) <= op < max(readers, default=op):
                fixed[op] += param.num_bytes * (2 if op in readers else 1)
    slope = max(coming, 0.0, *slopes.values()) + going
    first = max(coming, 0.0, *(slopes[op] + fixed[op] for op in own)) + going
    beyond = first + slope * (samples - 1)
    if not line:
        beyond = max(coming * samples, 0.0, *(slopes[op] * samples + fixed[op] for op in own)) + going * samples
    if not any(graph.differentiated >> op & 1 for op in own):
        return total + kept * samples + beyond
    return total + kept * samples * in_flight + beyond


@pytest.mark.parametrize("seed", range(60))
def test_peak_bytes_are_those_of_the_definition(seed: int) -> None:
    rng = random.Random(seed)
    problem = random_problem(rng)
    for _ in range(5):
        stage, depth = random_stage(rng, problem), rng.choice([None, 4, 7])
        memory = stage_bytes(problem, stage, depth)
        for held in (1, 2, 5):
            assert memory.peak(held) == pytest.approx(defined_bytes(problem, stage, held, depth), rel=1e-12)
        billed, everything = StageCost.of(problem, stage, depth).memory, problem.minibatch_size // stage.microbatch_size
        exact = defined_bytes(problem, stage, 0, depth, line=False)
        if stage.ahead >= everything:
            assert billed.resident <= exact * (1 + 1e-12)
        elif any(problem.graph.differentiated >> op & 1 for op in stage.ops):
            assert billed.resident == pytest.approx(exact, rel=1e-12)
        assert billed == memory._replace(transient=billed.transient)
        assert memory.peak(0) == memory.resident == sum((memory.static, memory.versions, memory.transient))


@pytest.mark.parametrize("seed", range(20))
def test_arrays_of_stages_cost_what_each_of_them_does(seed: int) -> None:
    """What planners tabulate and what a single stage is billed are one formula; the depth that fits is the largest that does."""
    rng = random.Random(seed)
    problem = random_problem(rng)
    masks = [rng.randrange(1, 1 << problem.graph.num_ops) for _ in range(8)]
    single = [problem.amounts(mask) for mask in masks]
    many = Amounts(
        *(
            column[0] if name == "drains" else np.array(column)
            for name, column in zip(Amounts._fields, zip(*single, strict=True), strict=True)
        )
    )
    copies, samples = rng.randint(1, 4), rng.randint(1, 5)
    for held in (1, 3):
        expected = [amounts.held(samples, copies).peak(held) for amounts in single]
        assert many.held(samples, copies).peak(held).tolist() == expected
        assert many.take(np.array([2, 0])).held(samples, copies).peak(held).tolist() == [expected[2], expected[0]]
    limit = float(np.median([amounts.held(samples, copies).peak(3) for amounts in single]))
    for depth, amounts in zip(many.held(samples, copies).depth(limit, 99).tolist(), single, strict=True):
        memory = amounts.held(samples, copies)
        if memory.resident > limit:
            assert depth == 0
        elif memory.microbatch == 0:
            assert depth == 99
        else:
            assert memory.peak(depth) <= limit * (1 + 1e-9) < memory.peak(depth + 1) * (1 + 2e-9)


def planned(rng: random.Random) -> tuple[Problem, Plan, Program]:
    """A problem, a chain of its operators whose replicas split or take turns, and its program."""
    weights = rng.choice(POLICIES)
    n = rng.randint(2, 4)
    graph = random_graph(rng)
    while graph.num_ops < n:
        graph = random_graph(rng)
    cuts = [0, *sorted(rng.sample(range(1, graph.num_ops), n - 1)), graph.num_ops]
    # Without drains a micro-batch divides the mini-batch; else the last one may be smaller.
    batch, b = (24, 2) if not weights.flushes or rng.random() < 0.5 else (23, 4)
    problem = Problem(graph=graph, cluster=devices(rng, 6), cost=Analytical(), minibatch_size=batch, regime=Regime(weights=weights))
    parts = [(sum(1 << op for op in range(a, z)), rng.choice([1, 2]) if s < 2 else 1) for s, (a, z) in enumerate(pairwise(cuts))]
    turns = [r > 1 and batch % (b * r) == 0 and rng.random() < 0.5 for _, r in parts]
    plan = make_plan(problem, "test", parts, b, chain=True, ordered=True, sharing=[IN_TURN if turn else None for turn in turns])
    schedule = OneFOneB() if weights.flushes else NoFlush()
    minibatches = 1 if weights.flushes else window(plan, POSTED_AHEAD)
    return problem, plan, lower(plan, graph, schedule, minibatches=minibatches)


@pytest.mark.parametrize("seed", range(40))
def test_the_simulator_takes_seconds_and_bytes_from_the_bill(seed: int) -> None:
    problem, plan, program = planned(random.Random(seed))
    bills, timeline = plan.bills(problem), simulate(program, plan, problem)
    seen = set()
    for event in timeline.events:
        if event.kind not in "FBU":
            continue
        stage, bill = plan.stages[event.stage], bills[event.stage]
        last = event.kind != "U" and (event.microbatch + 1) * stage.microbatch_size > program.num_samples
        expected = {
            "F": bill.last_forward_s if last else bill.forward_s,
            "B": bill.last_backward_s if last else bill.backward_s,
            "U": bill.update_s,
        }[event.kind]
        assert event.end_s - event.start_s == pytest.approx(expected, abs=1e-9 * timeline.metrics.iteration_s)
        seen.add(event.kind)
    assert "F" in seen
    metrics = timeline.metrics
    for s, stage in enumerate(plan.stages):
        held = max(metrics.max_in_flight_samples[s] // stage.unit, 1)
        need = bills[s].memory.peak(held)
        assert all(metrics.peak_memory_bytes[d] == pytest.approx(need, abs=1) for d in stage.devices)
        assert bills[s].version_bytes == pytest.approx(
            (metrics.weight_versions[s] - 1) * problem.trainable_bytes(stage.ops), abs=1e-6
        )


def test_the_last_micro_batch_is_billed_by_its_samples() -> None:
    rng = random.Random(0)
    problem = replace(random_problem(rng, 14), regime=Regime())
    stage = Stage(ops=(0, 1), devices=(0,), microbatch_size=4, in_flight=4)
    bill = StageCost.of(problem, stage)
    assert (bill.forward_s, bill.backward_s) == problem.stage_times((0, 1), 4, (0,))
    assert (bill.last_forward_s, bill.last_backward_s) == problem.stage_times((0, 1), 2, (0,))


@pytest.mark.parametrize("seed", range(5))
def test_a_bill_reads_back_equal(seed: int) -> None:
    rng = random.Random(seed)
    problem = random_problem(rng)
    bill = StageCost.of(problem, random_stage(rng, problem))
    assert from_json(StageCost, to_json(bill)) == bill


def test_a_bill_is_made_once() -> None:
    rng = random.Random(1)
    problem = random_problem(rng)
    stage = random_stage(rng, problem)
    assert StageCost.of(problem, stage) is StageCost.of(problem, replace(stage))
    assert StageBytes(1.0, 2.0, 3.0, 4.0).peak(2) == 13.0
