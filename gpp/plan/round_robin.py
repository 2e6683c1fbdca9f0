"""Replicas that take whole micro-batches in turn (PipeDream's 1F1B-RR) instead of splitting every one.

A replica computes R times as much in each of R times fewer passes, so what a pass costs by itself (launching kernels, messages)
is paid R times less often. In exchange it keeps whole micro-batches, and there must be R of them between two updates.
"""

from __future__ import annotations

from dataclasses import replace

from gpp.cost.problem import Problem
from gpp.errors import InvalidConfig
from gpp.plan.in_flight import in_flight_samples
from gpp.plan.plan import Plan

ROUND_ROBIN = "round_robin"
"""What the replicas of a stage do with its micro-batches."""


def check_turns(problem: Problem, size: int | None) -> None:
    """Refuse round robin where a mini-batch is one micro-batch, before a search that could not use them.

    Args:
        size: samples of a micro-batch, where they are imposed.

    Raises:
        InvalidConfig: the mini-batch is one micro-batch.
    """
    if size != problem.minibatch_size:
        return
    half = max(problem.minibatch_size // 2, 1)
    fix = "strategy.weights.accumulation=2" if problem.microbatch_size is None else f"microbatch_size={half}"
    rule = "one micro-batch a mini-batch leaves nothing to take in turn"
    raise InvalidConfig(
        "strategy.replicas", ROUND_ROBIN, rule, f"set {fix} (a multiple of the replicas), or strategy.replicas=split"
    )


def in_turn(plan: Plan, problem: Problem) -> Plan:
    """The plan in which replicas take whole micro-batches in turn. Its explanation says where they do not.

    They do where their number divides the micro-batches of a mini-batch, and nowhere if whole micro-batches do not fit the memory.
    """
    turned, split = [], []
    for s, stage in enumerate(plan.stages):
        count, replicas = -(-plan.minibatch_size // stage.microbatch_size), len(stage.replicas)
        turned.append(replace(stage, round_robin=replicas > 1 and count % replicas == 0))
        split += [s] if count % replicas else []
    if all(stage.round_robin_degree == 1 for stage in turned):
        return _noted(plan, split)
    shapes = [(stage.microbatch_size, stage.k, stage.round_robin_degree) for stage in turned]
    drained = plan.minibatch_size if problem.regime.weights.flushes else None
    held = in_flight_samples(shapes, plan.edges, drained, problem.regime.holds)
    stages = tuple(replace(stage, in_flight=samples) for stage, samples in zip(turned, held, strict=True))
    found = replace(plan, stages=stages)
    needs = found.device_memory(problem, dict(enumerate(held)))
    if any(need > problem.cluster.devices[device].memory_bytes for device, need in needs.items()):
        line = "replicas split every micro-batch: whole ones in turn would need more memory than a device has"
        return replace(plan, explanation=(*plan.explanation, line))
    return _noted(found, split)


def _noted(plan: Plan, split: list[int]) -> Plan:
    if not split:
        return plan
    which = f"stage{'s' * (len(split) > 1)} {', '.join(map(str, split))}"
    line = f"{which}: replicas split every micro-batch, as their number does not divide those of a mini-batch"
    return replace(plan, explanation=(*plan.explanation, line))
