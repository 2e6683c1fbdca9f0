"""The ways through a candidate's stages, each of which bounds the time of a step from below."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from gpp.cost.regime import Regime


def walk(
    regime: Regime,
    num_microbatches: int,
    in_flight: Sequence[float],
    times: Sequence[tuple[float, float, float]],
    sent: Callable[[int], Sequence[tuple[float, float]]],
    update_s: Callable[[int], float],
    nexts: list[list[int]],
    below_s: float = math.inf,
) -> tuple[list[float], list[int]]:
    """No iteration is shorter than any of these, by stage: its micro-batches, and its update or the way to it and back.

    Micro-batches take their compute time, or as many round trips to the farthest sink as the samples in flight force one after
    the other. A way there and back ends with the update of the stage where it begins, whose next step waits for both
    (`gpp.simulate.period`). In a pipeline that does not drain there are no ways, and an update holds its stage up every time.

    Where backwards are in parts, only the first ones are on a round trip and on a way; what is late of the last micro-batch
    stands before the update.

    Also the stage before each on its longest way; -1 at its end. A stage that takes `below_s` or longer is the last one that is
    looked at.

    Args:
        in_flight: micro-batches that each stage holds in full.
        times: of every stage, in a topological order: seconds of a forward and a backward, and of what is late of the latter.
        sent: seconds of the messages there and back between a stage and each of its successors.
        update_s: seconds of a stage's sums and update.
        nexts: the successors of every stage.
    """
    count, parts = len(times), regime.holds.parts
    late = [weight_s if parts else 0.0 for *_, weight_s in times]
    trip = [forward + backward - left for (forward, backward, _), left in zip(times, late, strict=True)]
    moves: list[Sequence[tuple[float, float]]] = []
    drains, updates, trips = regime.minibatches == 1, list[float](), list[float]()
    for s in range(count - 1, -1, -1):
        longest, own = 0.0, sent(s)
        for t, (ahead, back) in zip(nexts[s], own, strict=True):
            around = trip[t] + ahead + back
            if around > longest:
                longest = around
        trip[s] += longest
        rounds = -(-num_microbatches // in_flight[s]) if drains else num_microbatches / in_flight[s]
        moves.append(own)
        trips.append(rounds * trip[s])
        updates.append(update_s(s))
        if drains and not parts and updates[-1] + trips[-1] >= below_s:
            return [updates[-1] + trips[-1]], [-1]
    moves.reverse()
    way, came_from = [0.0] * count, [-1] * count
    bounds = []
    for s, (forward, backward, _) in enumerate(times):
        busy, update, around_s = num_microbatches * (forward + backward), updates[-1 - s], trips[-1 - s]
        if not drains:
            bounds.append(max(busy + regime.minibatches * update, around_s))
        elif parts:
            # While the way back runs, the stage makes gradients of its weights.
            bounds.append(max(update + busy, way[s] + max(busy - num_microbatches * late[s], around_s)))
        else:
            bounds.append(max(way[s], update) + max(busy, around_s))
        if bounds[-1] >= below_s:
            break
        begun = max(way[s], update + late[s]) + forward
        for t, (ahead, back) in zip(nexts[s], moves[s], strict=True):
            around = begun + ahead + back + backward - late[s]
            if around > way[t]:
                way[t], came_from[t] = around, s
    return bounds, came_from
