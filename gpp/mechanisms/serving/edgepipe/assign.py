"""Devices for stages that are given, and changes of stages and devices that shorten the bottleneck."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from gpp.graph.op_graph import bits
from gpp.mechanisms.serving.edgepipe.forward import Assigned, ForwardProblem, Kinds
from gpp.planners.common.incumbent import MARGIN

MOST_TRIED = 20_000
"""Assignments of one stage that a search for one bottleneck may try."""

MOST_JUDGED = 4_000
"""Changed plans that `improve` judges."""


def assigned(forward: ForwardProblem, kinds: Kinds, masks: Sequence[int]) -> Assigned | None:
    """Stages on the devices with the least bottleneck that a search finds; None where there is none.

    The search for each bottleneck is exact up to `MOST_TRIED` steps. Of types whose devices differ, the first free device is taken.

    Args:
        masks: operators of each stage, in an order in which messages go forward.
    """
    own = [[forward.stage_s(mask, group[0]) for group in kinds.groups] for mask in masks]
    fits = [[forward.fits(mask, group[0]) for group in kinds.groups] for mask in masks]
    edges = [(s, t, size) for t in range(len(masks)) for s in range(t) if (size := forward.message_bytes(masks[s], masks[t]))]
    pairs = [(u, v) for u in range(len(kinds.groups)) for v in range(len(kinds.groups))]
    moves = {(s, t): {(u, v): kinds.move_s(u, v, size) for u, v in pairs} for s, t, size in edges}
    levels = sorted({x for row in own for x in row} | {x for by_pair in moves.values() for x in by_pair.values()})
    low, high, best = 0, len(levels) - 1, None
    while low <= high:
        middle = (low + high) // 2
        found = _within(levels[middle], own, fits, moves, kinds.counts)
        if found is None:
            low = middle + 1
        else:
            best, high = found, middle - 1
    return None if best is None else kinds.placed(zip(masks, best, strict=True))


def _within(
    tau: float,
    own: list[list[float]],
    fits: list[list[bool]],
    moves: dict[tuple[int, int], dict[tuple[int, int], float]],
    counts: Sequence[int],
) -> list[int] | None:
    """The type of each stage under a bottleneck, stages with the fewest choices first."""
    choices = [
        [k for k, (seconds, fit) in enumerate(zip(row, room, strict=True)) if fit and seconds <= tau]
        for row, room in zip(own, fits, strict=True)
    ]
    order = sorted(range(len(own)), key=lambda s: (len(choices[s]), -max(own[s])))
    free, kind_of, left = list(counts), dict[int, int](), [MOST_TRIED]

    def arrives(s: int, kind: int) -> bool:
        for other, its in kind_of.items():
            a, b, pair = (s, other, (kind, its)) if s < other else (other, s, (its, kind))
            if (a, b) in moves and moves[a, b][pair] > tau:
                return False
        return True

    def place(at: int) -> bool:
        if at == len(order):
            return True
        s = order[at]
        # The slowest device that does leaves the faster ones to others.
        for kind in sorted(choices[s], key=lambda k: -own[s][k]):
            left[0] -= 1
            if left[0] < 0:
                return False
            if free[kind] and arrives(s, kind):
                free[kind] -= 1
                kind_of[s] = kind
                if place(at + 1):
                    return True
                free[kind] += 1
                del kind_of[s]
        return False

    return [kind_of[s] for s in range(len(own))] if place(0) else None


def improve(forward: ForwardProblem, stages: Assigned) -> Assigned:
    """The stages, changed as long as their loads, the longest first, become smaller.

    A change moves an operator of the slowest stage (or of either end of the slowest message) to another stage, or exchanges its
    device with another stage's or with an idle one.
    """
    loads, left = forward.loads(stages), MOST_JUDGED
    while left > 0:
        for changed in _changes(forward, stages):
            left -= 1
            new = forward.loads(changed)
            if _shorter(new, loads):
                stages, loads = changed, new
                break
            if left <= 0:
                break
        else:
            return stages
    return stages


def _shorter(new: list[float], old: list[float]) -> bool:
    """Whether the first load that differs is shorter by more than rounding."""
    for a, b in zip(new, old, strict=False):
        if a < b * MARGIN:
            return True
        if b < a * MARGIN or (math.isinf(a) and math.isinf(b)):
            return False
    return len(new) < len(old)


def _changes(forward: ForwardProblem, stages: Assigned) -> Iterator[Assigned]:
    graph, taken = forward.problem.graph, {device for _, device in stages}
    idle = [device for device in range(forward.problem.cluster.num_devices) if device not in taken]
    for s in forward.slowest(stages):
        mask, device = stages[s]
        for op in bits(mask):
            for t in range(len(stages)):
                behind, before = graph.successors[op], graph.predecessors[op]
                others = range(s, t) if t > s else range(t + 1, s + 1)
                # The stages' order stays one in which messages go forward.
                blocking = behind if t > s else before
                if t != s and not any(stages[i][0] & blocking for i in others):
                    moved = list(stages)
                    moved[s], moved[t] = (mask & ~(1 << op), device), (stages[t][0] | 1 << op, stages[t][1])
                    yield tuple(stage for stage in moved if stage[0])
        for t, (other, its) in enumerate(stages):
            if t != s:
                swapped = list(stages)
                swapped[s], swapped[t] = (mask, its), (other, device)
                yield tuple(swapped)
        for its in idle:
            yield (*stages[:s], (mask, its), *stages[s + 1 :])
