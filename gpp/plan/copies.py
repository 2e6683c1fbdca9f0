"""Copies of a pipeline side by side, for a model that runs at one batch size only: each replica takes micro-batches of that size.

Two copies of a pipeline of two stages on four devices; a micro-batch of the plan holds one of each copy:

    s0: d0, d2        replica 0 of each stage has the first half of every micro-batch
    s1: d1, d3        replica 1 the second, which never meets the first but in the sums of gradients
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from gpp.cluster import Cluster
from gpp.cost.problem import Problem, divisors
from gpp.errors import Infeasible
from gpp.plan.plan import Plan


def copied(plan: Plan, copies: int, apart: int) -> Plan:
    """A plan so many times on devices `apart` from each other, of as many times the mini-batch.

    >>> print(copied(make_plan(problem, "mine", [(0b01, 1), (0b10, 1)], microbatch_size=1), copies=2, apart=2))
    mine: depth 2, mini-batch 8
    stage  operators  devices  micro-batch  in flight  next
    s0     1          d0 d2    2            4          s1
    s1     1          d1 d3    2            2
    """
    stages = tuple(
        replace(
            stage,
            devices=tuple(device + copy * apart for copy in range(copies) for device in stage.devices),
            microbatch_size=stage.microbatch_size * copies,
            in_flight=stage.in_flight * copies,
        )
        for stage in plan.stages
    )
    return replace(plan, stages=stages, minibatch_size=plan.minibatch_size * copies)


def best_copies(problem: Problem, plan_of: Callable[[Problem], Plan], step_s: Callable[[Plan, Problem], float]) -> Plan:
    """The fastest plan whose replicas are copies of a whole pipeline; their number divides the devices and the micro-batches.

    Args:
        problem: of a model that runs at `problem.microbatch_size` samples only.
        plan_of: plans a problem without replicas.
        step_s: predicted seconds of a plan's step.

    Raises:
        Infeasible: not even one pipeline over all devices fits, nor any copies of shorter ones; says why of the former.
    """
    size, count = problem.microbatch_size or problem.minibatch_size, problem.cluster.num_devices
    single, found, refused = replace(problem, copies=False, max_replicas=1), list[tuple[float, int, Plan]](), list[Infeasible]()
    for copies in divisors(count):
        apart = count // copies
        if problem.minibatch_size // size % copies or not _alike(problem.cluster, apart):
            continue
        part = replace(single, cluster=problem.cluster.only(range(apart)), minibatch_size=problem.minibatch_size // copies)
        try:
            plan = plan_of(part)
            if any(stage.beside for stage in plan.stages) and copies > 1:
                continue
            plan = copied(plan, copies, apart)
            found.append((step_s(plan, single), copies, plan))
        except Infeasible as error:
            refused.append(error)
    if not found:
        raise refused[0]
    _, copies, plan = min(found, key=lambda one: one[:2])
    if copies == 1:
        return plan
    line = f"{copies} copies of a pipeline, each with micro-batches of {size} samples, the only size that the model runs at"
    return replace(plan, explanation=(*plan.explanation, line))


def _alike(cluster: Cluster, apart: int) -> bool:
    """Whether every `apart` devices in a row are as the first are, in as many nodes, and have no links of their own."""
    if not cluster.homogeneous or cluster.links:
        return False
    shapes = set()
    for start in range(0, cluster.num_devices, apart):
        nodes = cluster.nodes[start : start + apart]
        shapes.add(tuple(nodes.index(node) for node in nodes))
    return len(shapes) == 1
