"""The planners of the table: this platform's, those that others released, and two ways to cut by hand."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import Any

from baselines.released.pipedream import PipeDreamOptimizer
from baselines.released.piper import PiperPlanner
from benchmarks.pipebench.verify import Invalid, judge
from gpp.cluster import flat
from gpp.cost.models.constant import Constant
from gpp.cost.problem import Problem
from gpp.errors import GppError
from gpp.graph.op_graph import Op, OpGraph, Param, Tensor
from gpp.plan.plan import Plan
from gpp.planners.base import AbstractPlanner
from gpp.planners.bounds.optimal import Optimal
from gpp.planners.chains.even import Even
from gpp.planners.chains.pipedream import PipeDream
from gpp.planners.chains.piper import Piper
from gpp.planners.chains.sequential import Sequential
from gpp.planners.graphpipe.graphpipe import GraphPipe
from gpp.schedules.one_f_one_b import OneFOneB
from gpp.strategy import Strategy

Answer = dict[str, Any]
SMALL = 12
"""Operators up to which constraint programming is asked."""


def posed(problem: dict[str, Any]) -> Problem:
    """The problem as the platform has it."""
    ops, params = [], []
    for i, op in enumerate(problem["operators"]):
        name = f"{i}.{op['name']}"
        if op["parameters"]:
            params.append(Param(name=f"{name}.weight", num_bytes=op["parameters"]))
        ops.append(
            Op(
                name=name,
                forward_flops=op["forward"],
                backward_flops=op["backward"],
                saved_bytes=op["saved"],
                params=(f"{name}.weight",) if op["parameters"] else (),
            )
        )
    tensors = tuple(
        Tensor(name=f"t{i}", producer=t["from"], consumers=tuple(t["to"]), bytes_per_sample=t["bytes"], saved=t["stored"])
        for i, t in enumerate(problem["tensors"])
    )
    most = problem["max_replicas"]
    return Problem(
        graph=OpGraph(name=problem["name"], ops=tuple(ops), tensors=tensors, params=tuple(params)),
        cluster=flat(
            num_devices=problem["devices"],
            bandwidth_bytes_per_s=problem["bandwidth"],
            memory_bytes=problem["memory"],
            latency_s=problem["latency"],
        ),
        cost=Constant(),
        minibatch_size=problem["minibatch"],
        optimizer_state_factor=problem["weight_copies"] - 2.0,
        max_replicas=most if most < problem["devices"] else None,
    )


def in_words(plan: Plan, name: str) -> Answer:
    """A plan of the platform in PipeBench's words."""
    stages = [{"operators": list(stage.ops), "devices": list(stage.devices)} for stage in plan.stages]
    return {"problem": name, "microbatch": plan.stages[0].microbatch_size, "stages": stages}


def planned(planner: AbstractPlanner, problem: dict[str, Any]) -> Answer:
    """A planner's plan under 1F1B.

    Raises:
        GppError: it finds none, or a wrong one.
    """
    strategy = Strategy(name="pipebench", planner=planner, schedule=OneFOneB())
    return in_words(strategy.plan(posed(problem)), problem["name"])


def _of_platform(make: Callable[[bool], AbstractPlanner]) -> Callable[[dict[str, Any]], Answer | None]:
    def answer(problem: dict[str, Any]) -> Answer | None:
        try:
            return planned(make(problem["max_replicas"] > 1), problem)
        except GppError:
            return None

    return answer


def uniform(problem: dict[str, Any]) -> Answer | None:
    """A stage a device, of equal numbers of operators, at the largest micro-batch with four of them for each stage."""
    return _first_that_fits(problem, [min(problem["devices"], len(problem["operators"]))])


def by_hand(problem: dict[str, Any]) -> Answer | None:
    """What Megatron's users are told: the shortest pipeline that fits, replicas for other devices, equal numbers of operators."""
    every, most = problem["devices"], min(problem["devices"], len(problem["operators"]))
    lengths = [p for p in range(1, most + 1) if every % p == 0 and every // p <= problem["max_replicas"]]
    return _first_that_fits(problem, lengths)


def _first_that_fits(problem: dict[str, Any], lengths: list[int]) -> Answer | None:
    count, minibatch = len(problem["operators"]), problem["minibatch"]
    for length in lengths:
        replicas = problem["devices"] // length if len(lengths) > 1 else 1
        sizes = [b for b in range(minibatch, 0, -1) if minibatch % b == 0 and b % replicas == 0]
        # Four micro-batches a stage keep the bubble at a fifth; a single stage has none.
        for b in [b for b in sizes if minibatch // b >= 4 * length or length == 1] or sizes[-1:]:
            cuts = [count * s // length for s in range(length + 1)]
            stages = [
                {"operators": list(range(lo, hi)), "devices": list(range(s * replicas, (s + 1) * replicas))}
                for s, (lo, hi) in enumerate(pairwise(cuts))
            ]
            plan = {"problem": problem["name"], "microbatch": b, "stages": stages}
            try:
                judge(problem, plan)
            except Invalid:
                continue
            return plan
    return None


@cache
def planners() -> dict[str, Callable[[dict[str, Any]], Answer | None]]:
    """Name -> planner; None is its answer where it finds nothing."""
    exact = _of_platform(lambda many: Optimal(replication=many, colocate="never", limit=5))
    return {
        "graphpipe": _of_platform(lambda many: GraphPipe(replication=many, colocate="never")),
        "sequential": _of_platform(lambda many: Sequential(replication=many)),
        "pipedream": _of_platform(lambda many: PipeDream(replication=many)),
        "piper": _of_platform(lambda many: Piper(replication=many, tensor_parallel=False)),
        "pipedream released": _of_platform(
            lambda many: PipeDream(replication=many, compatible=True, released=PipeDreamOptimizer())
        ),
        "piper released": _of_platform(lambda many: Piper(replication=many, compatible=True, released=PiperPlanner())),
        "equal time": _of_platform(lambda many: Even()),
        "uniform": uniform,
        "by hand": by_hand,
        "CP-SAT": lambda problem: exact(problem) if len(problem["operators"]) <= SMALL else None,
    }
