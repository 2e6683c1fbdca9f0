"""The ways through a candidate's stages, each of which bounds the time of a step from below."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpp.planners.common.candidates import Assessor, Parts


def walk(
    assessor: Assessor,
    parts: Parts,
    devices: Sequence[tuple[int, ...]],
    b: int,
    nexts: list[list[int]],
    depth: list[int],
    below_s: float = math.inf,
) -> tuple[list[float], list[int]]:
    """No iteration is shorter than any of these, by stage: its micro-batches, and its update or the way to it and back.

    Micro-batches take their compute time, or as many round trips to the farthest sink as the samples in flight force one after
    the other. A way there and back ends with the update of the stage where it begins, whose next step waits for both
    (`gpp.simulate.period`). In a pipeline that does not drain there are no ways, and an update holds its stage up every time.

    Where backwards are split, only their first halves are on a round trip and on a way; the second half of the last micro-batch
    stands before the update.

    Also the stage before each on its longest way; -1 at its end. Nothing comes after a stage that takes `below_s` or longer.
    """
    regime, count, num_microbatches = assessor.problem.regime, len(parts), assessor.problem.minibatch_size // b
    splits = regime.holds.splits
    times = [assessor.split_s(mask, b, own) for (mask, _), own in zip(parts, devices, strict=True)]
    late = [weight_s if splits else 0.0 for *_, weight_s in times]
    trip, moves, where = (
        [forward + backward - left for (forward, backward, _), left in zip(times, late, strict=True)],
        [],
        [(mask, own) for (mask, _), own in zip(parts, devices, strict=True)],
    )
    for s in range(count - 1, -1, -1):
        longest, sent = 0.0, assessor.transfers_s(*where[s], [where[t] for t in nexts[s]], b)
        for t, (ahead, back) in zip(nexts[s], sent, strict=True):
            around = trip[t] + ahead + back
            if around > longest:
                longest = around
        trip[s] += longest
        moves.append(sent)
    moves.reverse()
    way, came_from = [0.0] * count, [-1] * count
    bounds = []
    for s, (forward, backward, _) in enumerate(times):
        in_flight = regime.held(depth[s], num_microbatches)
        busy, update = num_microbatches * (forward + backward), assessor.update_s(parts[s][0], devices[s])
        if regime.minibatches == 1:
            trips = -(-num_microbatches // in_flight) * trip[s]
            if splits:
                # While the way back runs, the stage makes gradients of its weights.
                bounds.append(max(update + busy, way[s] + max(busy - num_microbatches * late[s], trips)))
            else:
                bounds.append(max(way[s], update) + max(busy, trips))
        else:
            bounds.append(max(busy + regime.minibatches * update, num_microbatches / in_flight * trip[s]))
        if bounds[-1] >= below_s:
            break
        begun = max(way[s], update + late[s]) + forward
        for t, (ahead, back) in zip(nexts[s], moves[s], strict=True):
            around = begun + ahead + back + backward - late[s]
            if around > way[t]:
                way[t], came_from[t] = around, s
    return bounds, came_from
