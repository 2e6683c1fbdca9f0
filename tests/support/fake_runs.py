"""Synthetic runs: a model of N branches, a plan, its predicted timeline, and the same from a slower machine."""

from __future__ import annotations

import random
from dataclasses import replace

from gpp import Cluster, Device, Even, Link, OneFOneB, Plan, Strategy, uniform
from gpp.analysis.comparison import Status
from gpp.cost.holding import DEPTH, Holding
from gpp.cost.models.constant import Constant
from gpp.cost.problem import Problem
from gpp.cost.regime import Regime
from gpp.graph.op_graph import Op, OpGraph, Param, Tensor, mask_of
from gpp.plan.build import make_plan
from gpp.report.run.record import Asked, Planned, PlanWorth, RunRecord
from gpp.timeline import Outcome, Timeline

STRATEGY = Strategy(name="graphpipe", planner=Even(), schedule=OneFOneB())


def branchy_graph(num_branches: int, depth: int = 4, trunk: int = 3) -> OpGraph:
    """`num_branches` towers of `depth` layers that meet in a trunk; FLOPs are seconds."""
    ops, tensors, params, ends = [], [], [], []
    for b in range(num_branches):
        for i in range(depth):
            params.append(Param(name=f"branches.{b}.layers.{i}.weight", num_bytes=4_000_000))
            ops.append(
                Op(
                    name=f"branches.{b}.layers.{i}",
                    forward_flops=4e-4 * (1 + b % 3),
                    backward_flops=8e-4 * (1 + b % 3),
                    saved_bytes=2e6,
                    params=(params[-1].name,),
                )
            )
            if i:
                tensors.append(Tensor(name=f"t{len(ops)}", producer=len(ops) - 2, consumers=(len(ops) - 1,), bytes_per_sample=4e5))
        ends.append(len(ops) - 1)
    for i in range(trunk):
        ops.append(
            Op(name="fusion" if i == 0 else f"head.layers.{i - 1}", forward_flops=4e-4, backward_flops=8e-4, saved_bytes=1e6)
        )
        producers = ends if i == 0 else [len(ops) - 2]
        tensors += [Tensor(name=f"j{p}_{i}", producer=p, consumers=(len(ops) - 1,), bytes_per_sample=2e5) for p in producers]
    return OpGraph(name=f"towers{num_branches}", ops=tuple(ops), tensors=tuple(tensors), params=tuple(params))


def branches_of(graph: OpGraph) -> tuple[int | None, ...]:
    return tuple(int(op.name.split(".")[1]) if op.name.startswith("branches") else None for op in graph.ops)


def cluster_of(num_devices: int) -> Cluster:
    device = Device(kind="cuda", memory_bytes=1.2e9, peak_flop_per_s={"float32": 1e13}, memory_bandwidth_bytes_per_s=9e11)
    return uniform(
        name=f"summit_1x{num_devices}",
        num_nodes=1,
        devices_per_node=num_devices,
        device=device,
        intra_node=Link(latency_s=1e-5, bandwidth_bytes_per_s=5e10),
    )


def plan_of(
    graph: OpGraph,
    *,
    per_branch: int = 2,
    trunk_devices: int = 2,
    microbatch: int = 4,
    minibatch: int = 32,
    chain: bool = False,
    holds: Holding = DEPTH,
) -> tuple[Plan, Problem]:
    """Every branch cut into `per_branch` stages, the trunk one stage on `trunk_devices`."""
    names = [op.name for op in graph.ops]
    parts: list[tuple[int, int]] = []
    for b in sorted({b for b in branches_of(graph) if b is not None}):
        ops = [i for i, name in enumerate(names) if name.startswith(f"branches.{b}.")]
        size = -(-len(ops) // per_branch)
        parts += [(mask_of(ops[i : i + size]), 1) for i in range(0, len(ops), size)]
    parts.append((mask_of(i for i, name in enumerate(names) if not name.startswith("branches")), trunk_devices))
    cluster = cluster_of(sum(count for _, count in parts))
    problem = Problem(graph=graph, cluster=cluster, cost=Constant(), minibatch_size=minibatch, regime=Regime(holds=holds))
    lines = (
        "searched 1,284 partitions at 4 micro-batch sizes in 0.21 s",
        "branches run side by side: depth 3 instead of 9 stages, so fewer samples are in flight",
        "the bottleneck is stage 4: a smaller one would need an operator inside branches.2 to be cut",
    )
    plan = make_plan(problem, "sequential" if chain else "graphpipe", parts, microbatch, chain=chain, explanation=lines)
    return replace(plan, search_s=0.213), problem


def timeline_of(plan: Plan, problem: Problem, source: str = "simulate", slower: float = 0.0) -> Timeline:
    """The prediction of a 1F1B step; of a slower machine, everything takes so much longer, and more memory."""
    predicted, by = STRATEGY.predict(plan, problem), 1 + slower
    metrics = replace(
        predicted.metrics,
        iteration_s=predicted.metrics.iteration_s * by,
        throughput_samples_per_s=predicted.metrics.throughput_samples_per_s / by,
        peak_memory_bytes={device: int(by * size) for device, size in predicted.metrics.peak_memory_bytes.items()},
    )
    events = tuple(event._replace(start_s=event.start_s * by, end_s=event.end_s * by) for event in predicted.events)
    return Timeline(source=source, events=events, metrics=metrics)


def unplanned_run(status: Status, reason: str) -> RunRecord:
    """A run that ended before there was a plan."""
    return RunRecord(asked=Asked(model="m", strategy="s", cluster="c", engine="e"), status=status, reason=reason)


def make_run(num_branches: int, *, measured: bool = True, **settings: object) -> RunRecord:
    """A whole run of the towers model."""
    graph = branchy_graph(num_branches)
    plan, problem = plan_of(graph, **settings)  # type: ignore[arg-type]
    predicted = timeline_of(plan, problem)
    real = timeline_of(plan, problem, "distributed", slower=0.25) if measured else None
    chain, other = plan_of(graph, **{**settings, "chain": True})  # type: ignore[arg-type]
    rng = random.Random(3)
    losses = [2.3 * 0.985**i + 0.05 * rng.random() for i in range(200)]
    evaluations = [{"step": s, "accuracy": 1 - 0.9 * 0.98**s} for s in range(0, 200, 25)]
    last = {"step": 200, "accuracy": 0.973, "loss": losses[-1]}
    return RunRecord(
        asked=Asked(
            model=graph.name,
            strategy=plan.planner,
            cluster=problem.cluster.name,
            engine="distributed",
            command="python run.py model=towers strategy=graphpipe",
        ),
        planned=Planned(plan=plan, graph=graph, cluster=problem.cluster, predicted=predicted),
        outcome=Outcome(measured=real, losses=tuple(losses), evaluations=(*evaluations, last)),
        judged=PlanWorth(baseline={"sequential": timeline_of(chain, other).metrics}),
        warnings=("measured on shared cores: times vary by some per cent",),
    )
