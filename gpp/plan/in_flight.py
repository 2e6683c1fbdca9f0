"""The samples that a stage holds between forward and backward: as many as keep the stages behind it busy.

The number follows from the successors, from the sinks to the sources:

    micro-batches of 1        2 before 1           3 replicas, each with one of 3

    3 -> 2 ---> 1             6 -> 2 -> 1          7 -> 6 -> 1
                ^
         2 -----+             b=2  b=1  b=1        stride 1, 3, 1
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gpp.cost.holding import Holding
from gpp.stage import neighbours


def required_in_flight(b: int, k: int, successor: tuple[int, int, int] | None, stride: int = 1) -> int:
    """Smallest number of samples in flight at a stage that does not starve its successor.

    Args:
        b, k: the stage's micro-batch size and its k of kFkB.
        successor: (in-flight samples, b, k) of the next stage; None for a sink.
        stride: micro-batches in a row of which a replica has a part in one (`Stage.stride`); each has one of its own in hand.

    Returns:
        Samples, a multiple of `b`, of `stride` times b where that is not 1. With several successors take the maximum.

    Source: reconstruction of GraphPipe's ComputeInFlight (Table 2). For k = 1: a stage of smaller
    micro-batches must have the successor's next micro-batch ready when its backward ends; a stage of
    larger ones needs the time of its own backward and forward before the successor runs dry.

    With a stride: PipeDream's rule (NOAM, SOSP '19) is the successor's plus the stride, of which each replica's share is rounded
    up. Here the rounded share counts for the stages before too. Else a stage whose replicas wait for a micro-batch that the stages
    before may not begin yet loses up to half of its time and more: a chain of 1, 3 and 1 replicas, equally fast, runs at half its
    pace.
    """
    own = stride * k * b
    if successor is None:
        return own
    held, b_next, k_next = successor
    need = held + max(own, b_next) if b <= b_next else held + own + b - min(b, k_next * b_next)
    return -(-need // (stride * b)) * stride * b


def in_flight_samples(
    shapes: Sequence[tuple[int, int, int]], edges: Iterable[tuple[int, int]], total: int | None, holds: Holding
) -> list[int]:
    """Samples in flight at every stage.

    Args:
        shapes: (b, k, stride) of the stages, in a topological order.
        total: samples between two drains; None: any number.
        holds: the schedule's wish for more than the smallest number: all, or a multiple of what lies beyond a stage's own k.

    >>> in_flight_samples([(1, 1, 1)] * 4, [(0, 1), (1, 3), (2, 3)], None, Holding())
    [3, 2, 2, 1]
    >>> in_flight_samples([(2, 1, 1), (1, 1, 1), (1, 1, 1)], [(0, 1), (1, 2)], None, Holding())
    [6, 2, 1]
    """
    needs, out, successors = [0] * len(shapes), [0] * len(shapes), neighbours(edges, len(shapes))
    for s in reversed(range(len(shapes))):
        b, k, stride = shapes[s]
        nexts = [(needs[t], *shapes[t][:2]) for t in successors[s]]
        alone = required_in_flight(b, k, None, stride)
        need = max((required_in_flight(b, k, after, stride) for after in nexts), default=alone)
        most = None if total is None else -(-total // b) * b
        needs[s] = need if most is None else min(need, most)
        ahead = need if holds.ahead is None else alone + holds.ahead * (need - alone)
        out[s] = ahead if most is None else most if holds.everything else min(ahead, most)
    return out
