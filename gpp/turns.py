"""Replicas that take whole micro-batches in turn (PipeDream's 1F1B-RR) instead of splitting every one.

A replica computes R times as much in each of R times fewer passes, so what a pass costs by itself (launching kernels, messages)
is paid R times less often. In exchange it keeps whole micro-batches, and there must be R of them between two updates.
"""

from __future__ import annotations

from dataclasses import replace

from gpp.in_flight import in_flight_samples
from gpp.plan import Plan

SPLIT, ROUND_ROBIN = "split", "round_robin"
WAYS = (SPLIT, ROUND_ROBIN)
"""What the replicas of a stage do with its micro-batches."""


def in_turn(plan: Plan, *, drains: bool, whole: bool) -> Plan:
    """The plan with replicas taking whole micro-batches in turn, where their number divides those of a mini-batch.

    Args:
        drains, whole: whether the pipeline is empty between two mini-batches, and every stage keeps all of one.
    """
    turned, split = [], []
    for s, stage in enumerate(plan.stages):
        count, replicas = -(-plan.minibatch_size // stage.microbatch_size), len(stage.replicas)
        divides = count % replicas == 0
        split += [s] if not divides else []
        turned.append(replace(stage, round_robin=replicas > 1 and divides))
    shapes = [(stage.microbatch_size, stage.k, stage.turns) for stage in turned]
    held = in_flight_samples(shapes, plan.edges, plan.minibatch_size if drains or whole else None, whole)
    line = f"stages {', '.join(map(str, split))} split micro-batches: their replicas do not divide those of a mini-batch"
    stages = tuple(replace(stage, in_flight=samples) for stage, samples in zip(turned, held, strict=True))
    return replace(plan, stages=stages, explanation=(*plan.explanation, line) if split else plan.explanation)
