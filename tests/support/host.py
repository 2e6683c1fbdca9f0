"""Plans that keep some of their activations on the host."""

from __future__ import annotations

import random
from dataclasses import replace

from gpp import OneFOneB, Plan
from gpp.cost.problem import Problem
from gpp.mechanisms.marks.stage import marked, marks_of
from gpp.plan.build import make_plan
from gpp.program.program import Program
from gpp.schedules.base import AbstractSchedule
from tests.support.graphs import chain, problem
from tests.support.programs import lower


def on_host(rng: random.Random, problem: Problem, plan: Plan) -> tuple[Problem, Plan]:
    """The same with operators of most stages on the host, over links slow and fast, shared or with messages on them."""
    stages = [
        marked(s, offload=tuple(op for op in s.ops if op not in marks_of(s).recompute and rng.random() < 0.8))
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


def hosted(
    count: int, batch: int, seconds: float, schedule: AbstractSchedule | None = None, microbatch_size: int = 1
) -> tuple[Program, Plan, Problem]:
    """A chain whose stages keep all on the host, the last two apart; a copy of a sample takes so many seconds."""
    schedule = schedule or OneFOneB()
    prob = problem(chain(count), count, batch)
    devices = tuple(replace(d, host_bandwidth_bytes_per_s=1.0 / seconds) for d in prob.cluster.devices)
    prob = replace(prob, cluster=replace(prob.cluster, devices=devices))
    plan = make_plan(prob, "test", [(1 << op, 1) for op in range(count)], microbatch_size)
    plan = replace(plan, stages=tuple(marked(s, offload=s.ops) if i + 2 < count else s for i, s in enumerate(plan.stages)))
    return lower(plan, prob.graph, schedule), plan, prob
