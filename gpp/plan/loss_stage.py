"""Losses on whole mini-batches: `loss.scope=minibatch`.

A loss that compares the samples of a batch with each other changes when the batch is cut. So its operators become a stage of
their own whose micro-batch is the whole mini-batch, on one device: routing gathers what they read (small: embeddings) and
scatters the gradients. The stages before it keep all their micro-batches in flight until the loss is there.

    before   text (b=4) ── head + loss (b=4)           after   text (b=4) ── head (b=4) ── loss (b=16, on head's device)
                        image (b=4) ┘                                        image (b=4) ────┘
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from gpp.cost.problem import Problem
from gpp.graph.captured import Captured
from gpp.graph.coarsen.apart import coarsen_apart
from gpp.graph.coarsen.coarsen import coarsen
from gpp.graph.coarsen.whole import whole_modules
from gpp.graph.op_graph import OpGraph, bits, mask_of
from gpp.graph.series_parallel import Order
from gpp.plan.plan import Plan
from gpp.stage import Stage

LossScope = Literal["microbatch", "minibatch"]


def coarsen_for(captured: Captured, max_ops: int | None, scope: LossScope, whole: Sequence[str] = ()) -> OpGraph:
    """The operators that planners see; with `scope` minibatch the loss's are merged with each other only.

    Args:
        max_ops: None for the operators as they were captured.
        whole: modules that are one operator each before anything else is merged (`whole_modules`).
    """
    graph = whole_modules(captured.graph, whole)
    if max_ops is None:
        return graph
    if scope == "microbatch":
        return coarsen(graph, max_ops)
    names = set(captured.loss_ops)
    return coarsen_apart(graph, max_ops, mask_of(i for i, op in enumerate(graph.ops) if op.name in names))


def loss_mask(captured: Captured, graph: OpGraph) -> int:
    """Mask of the operators of `graph`, coarse or not, that the loss function is made of."""
    names = set(captured.loss_ops)
    nodes = {node for op in captured.graph.ops if op.name in names for node in op.nodes}
    return mask_of(i for i, op in enumerate(graph.ops) if nodes & set(op.nodes))


def with_loss_apart(plan: Plan, problem: Problem) -> Plan:
    """The plan with `problem.minibatch_ops` in stages of their own, one for each connected part, on whole mini-batches.

    A part stays on the device of a stage that has nothing else to do, or moves to the one that makes most of what it
    reads. A plan that treats them so already is returned as it is.
    """
    apart = problem.minibatch_ops
    own = [stage for stage in plan.stages if mask_of(stage.ops) & apart]
    if all(stage.microbatch_size == plan.minibatch_size and len(stage.replicas) == 1 for stage in own):
        return plan
    stages = [stage.within(tuple(op for op in stage.ops if not apart >> op & 1)) for stage in plan.stages]
    kept = [s for s, stage in enumerate(stages) if stage.ops]
    position = {s: i for i, s in enumerate(kept)}
    owner = {op: position[s] for s in kept for op in stages[s].ops}
    # Edges of data follow from the operators; those that are an order only stay.
    orders = [edge for edge, tensors in plan.edge_tensors(problem.graph).items() if not tensors]
    edges = {(position[a], position[b]) for a, b in orders if a in position and b in position}
    out = [stages[s] for s in kept]
    for part in Order.of(problem.graph).components(apart):
        home = next(s for s, stage in enumerate(plan.stages) if mask_of(stage.ops) & part)
        size = plan.minibatch_size
        out.append(
            Stage(ops=tuple(bits(part)), devices=(_device(plan, problem, part, home),), microbatch_size=size, in_flight=size)
        )
        owner |= dict.fromkeys(bits(part), len(out) - 1)
        edges |= {(position[a], len(out) - 1) for a, b in orders if b == home and a in position and home not in position}
    for tensor in problem.graph.tensors:
        edges |= {(owner[tensor.producer], owner[c]) for c in tensor.consumers if owner[c] != owner[tensor.producer]}
    return replace(plan, stages=tuple(_all_in_flight(out, edges, plan.minibatch_size, len(kept))), edges=tuple(sorted(edges)))


def _device(plan: Plan, problem: Problem, part: int, home: int) -> int:
    """The device of a part of the loss. `home` is the first stage of the plan that holds some of it."""
    devices = plan.stages[home].devices
    if not mask_of(plan.stages[home].ops) & ~problem.minibatch_ops:
        return devices[0]
    made: dict[int, float] = defaultdict(float)
    for stage in plan.stages:
        mask = mask_of(stage.ops) & ~part
        num_bytes = sum(tensor.bytes_per_sample for tensor in problem.crossing(mask, part))
        for device in stage.devices:
            made[device] += num_bytes / len(stage.replicas)
    return min(made, key=lambda d: (-made[d], d not in devices, d))


def _all_in_flight(stages: list[Stage], edges: set[tuple[int, int]], minibatch_size: int, first: int) -> list[Stage]:
    """The stages. Those that lead to stage `first` or a later one have room for every micro-batch."""
    waits = set(range(first, len(stages)))
    for a, b in sorted(edges, reverse=True):
        if b in waits:
            waits.add(a)
    return [
        replace(stage, in_flight=-(-minibatch_size // stage.microbatch_size) * stage.microbatch_size) if s in waits else stage
        for s, stage in enumerate(stages)
    ]
