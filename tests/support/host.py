"""Plans that keep some of their activations on the host."""

from __future__ import annotations

import random
from dataclasses import replace

from gpp.cost.problem import Problem
from gpp.plan.plan import Plan


def on_host(rng: random.Random, problem: Problem, plan: Plan) -> tuple[Problem, Plan]:
    """The same with operators of most stages on the host, over links slow and fast, shared or with messages on them."""
    seconds, sharers = rng.choice([0.01, 0.3, 2.0, 8.0]), rng.choice([1, 1, 2])
    devices = tuple(
        replace(d, host_bandwidth_bytes_per_s=rng.choice([1.0, 0.5]) / seconds, host_latency_s=0.05, host_sharers=sharers)
        for d in problem.cluster.devices
    )
    inter = replace(problem.cluster.inter_node, over_host=rng.random() < 0.5)
    stages = [
        replace(s, offload=tuple(op for op in s.ops if rng.random() < 0.8))
        if plan.runs_backward(i, problem.graph) and rng.random() < 0.8
        else s
        for i, s in enumerate(plan.stages)
    ]
    cluster = replace(problem.cluster, devices=devices, inter_node=inter)
    return replace(problem, cluster=cluster), replace(plan, stages=tuple(stages))
