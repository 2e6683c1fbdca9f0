"""From compute orders to a whole program: communication, then gradient reduction and update."""

from __future__ import annotations

from collections import defaultdict

from gpp.graph.op_graph import OpGraph
from gpp.plan import Plan
from gpp.program import Action, Program, reduce_groups
from gpp.routing import copies, messages, pieces
from gpp.schedules.base import AbstractSchedule

Slots = dict[tuple[int, str, int], list[Action]]
"""(device, "F" or "B", micro-batch) -> messages around that compute action."""


def lower(plan: Plan, graph: OpGraph, schedule: AbstractSchedule, num_samples: int | None = None) -> Program:
    """The program of one pass over `num_samples` samples (default: the mini-batch).

    A schedule with backwards ends in reductions and the optimizer's step; one without is an evaluation.
    """
    total = plan.minibatch_size if num_samples is None else num_samples
    before, after = _communication(plan, graph, total)
    groups = reduce_groups(plan, graph)
    actions: dict[int, tuple[Action, ...]] = {}
    for s, stage in enumerate(plan.stages):
        order = schedule.order(plan, s, -(-total // stage.microbatch_size))
        trains = any(kind == "B" for kind, _ in order)
        for device in stage.devices:
            tail = [Action("R", s, g) for g, group in enumerate(groups) if device in group.devices] if trains else []
            if trains:
                tail.append(Action("U", s, 0))
            actions[device] = tuple(_interleave(order, s, device, before, after)) + tuple(tail)
    return Program(num_samples=total, actions=actions)


def _communication(plan: Plan, graph: OpGraph, total: int) -> tuple[Slots, Slots]:
    """Receives to post before, and sends to start after, every compute action."""
    before: Slots = defaultdict(list)
    after: Slots = defaultdict(list)
    group_of = {replica[0]: replica for stage in plan.stages for replica in stage.replicas}
    cut = [pieces(stage.devices[:: stage.tensor_parallel], stage.microbatch_size, total) for stage in plan.stages]
    tensors = plan.edge_tensors(graph)
    for s, t in plan.edges:
        # An order-only edge is an order in both directions; an edge of data without gradients only forwards.
        returns = not tensors[s, t] or any(tensor.differentiable for tensor in tensors[s, t])
        for src_first, src_mb, dst_first, dst_mb, lo, hi in messages(cut[s], cut[t]):
            for src, dst in copies(group_of[src_first], group_of[dst_first]):
                after[src, "F", src_mb].append(Action("SF", s, src_mb, t, dst, lo, hi))
                before[dst, "F", dst_mb].append(Action("RF", t, dst_mb, s, src, lo, hi))
                if returns:
                    after[dst, "B", dst_mb].append(Action("SB", t, dst_mb, s, src, lo, hi))
                    before[src, "B", src_mb].append(Action("RB", s, src_mb, t, dst, lo, hi))
    return before, after


def _interleave(order: list[tuple[str, int]], s: int, device: int, before: Slots, after: Slots) -> list[Action]:
    """Post the receives of the next compute action before the current one, so that they overlap."""
    out = list(before.get((device, *order[0]), ())) if order else []
    for i, (kind, m) in enumerate(order):
        if i + 1 < len(order):
            out += before.get((device, *order[i + 1]), ())
        out.append(Action(kind, s, m))
        out += after.get((device, kind, m), ())
    return out
