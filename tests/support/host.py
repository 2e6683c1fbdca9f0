"""Plans that keep some of their activations on the host."""

from __future__ import annotations

import random
from dataclasses import replace

from gpp.cost.problem import Problem
from gpp.plan.plan import Plan


def on_host(rng: random.Random, problem: Problem, plan: Plan) -> tuple[Problem, Plan]:
    """The same with operators of most stages on the host, over links slow and fast, shared or with messages on them."""
    stages = [
        replace(s, offload=tuple(op for op in s.ops if op not in s.recompute and rng.random() < 0.8))
        if plan.runs_backward(i, problem.graph) and rng.random() < 0.8
        else s
        for i, s in enumerate(plan.stages)
    ]
    plan = replace(plan, stages=tuple(stages))
    bills = plan.bills(problem)
    moved, forward_s = sum(bill.moved_bytes for bill in bills), sum(bill.forward_s for bill in bills)
    rate = max(moved, 1.0) / forward_s * rng.choice([100.0, 4.0, 1.0, 0.3])
    latency_s, sharers = forward_s / len(bills) * rng.choice([0.0, 0.05]), rng.choice([1, 1, 2])
    devices = tuple(
        replace(d, host_bandwidth_bytes_per_s=rng.choice([1.0, 0.5]) * rate, host_latency_s=latency_s, host_sharers=sharers)
        for d in problem.cluster.devices
    )
    inter = replace(problem.cluster.inter_node, over_host=rng.random() < 0.5)
    return replace(problem, cluster=replace(problem.cluster, devices=devices, inter_node=inter)), plan
