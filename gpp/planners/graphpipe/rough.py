"""A quick estimate of a plan whose devices hold several stages: which neighbours of a search are worth a prediction.

What such a plan takes depends on how its stages' passes interleave, which no bound shows: stages that are equally long may wait for
each other or not. So a few micro-batches are run as `gpp.schedules.merge` runs all of them, each stage in the order of 1F1B, and
the others take what the busiest device does for one. A replicated stage needs all of what it reads from.

This is no walk of `gpp.simulate.longest_path`: which pass a device takes next depends on what has come by then, so the order that a
walk needs is itself what is looked for. Nor is it a prediction: links have no queues here, and the last word is the simulator's.

Complexity: O(P (S + log P)) for P passes of these micro-batches and S stages on each device.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

from gpp.planners.common.candidates import Assessor, Parts
from gpp.planners.common.placement import Placement

MORE = 2
"""Micro-batches beyond the depth, so that the steady state shows."""

MOST = 8
"""Micro-batches that are run, however deep the pipeline."""

FORWARDS, BACKWARDS = 0, 1


def rough_s(assessor: Assessor, parts: Parts, placement: Placement, microbatch_size: int) -> float:
    """About how many seconds an iteration takes.

    Args:
        parts: in stage order, as in a `Candidate`.
    """
    arranged = assessor.arranged(parts, False)
    assert arranged is not None, "a candidate has no cycle"
    _, nexts, depth = arranged
    every = assessor.problem.minibatch_size // microbatch_size
    count = min(every, max(depth) + MORE, MOST)
    seconds = [assessor.stage_s(mask, microbatch_size, own) for (mask, _), own in zip(parts, placement, strict=True)]
    needs = _needs(assessor, parts, placement, microbatch_size, nexts)
    orders = [_order(assessor.problem.regime.held(d, count), count) for d in depth]
    readers: list[list[list[tuple[int, float]]]] = [[[] for _ in parts] for _ in (FORWARDS, BACKWARDS)]
    for way in (FORWARDS, BACKWARDS):
        for s, found in enumerate(needs[way]):
            for other, late in found:
                readers[way][other] += [(device, late) for device in placement[s]]
    ends = [[[0.0] * count for _ in parts] for _ in (FORWARDS, BACKWARDS)]
    left = [[[len(own)] * count for own in placement] for _ in (FORWARDS, BACKWARDS)]
    free = [0.0] * assessor.cluster.num_devices
    heads: list[list[list[int]]] = [[] for _ in free]
    for s, own in enumerate(placement):
        for device in own:
            heads[device].append([s, 0])
    wakes = [(0.0, device) for device, own in enumerate(heads) if own]
    while wakes:
        now, device = heappop(wakes)
        if free[device] > now:
            continue  # It wakes again when it has done what it does.
        best, chosen = (FORWARDS - 1, 0, 0), None
        for head in heads[device]:
            s, place = head
            if place == len(orders[s]):
                continue
            way, m = orders[s][place]
            for other, late in needs[way][s]:
                if left[way][other][m] or ends[way][other][m] + late > now:
                    break
            else:
                # Backwards first, then what is nearer to the sink.
                key = way, -depth[s], s
                if key > best:
                    best, chosen = key, head
        if chosen is None:
            continue
        s, place = chosen
        way, m = orders[s][place]
        end = free[device] = now + seconds[s][way]
        chosen[1] += 1
        ends[way][s][m] = max(ends[way][s][m], end)
        left[way][s][m] -= 1
        heappush(wakes, (end, device))
        if not left[way][s][m]:
            for reader, late in readers[way][s]:
                heappush(wakes, (ends[way][s][m] + late, reader))
    busiest, updates = [0.0] * len(free), [0.0] * len(free)
    for (mask, _), own, took in zip(parts, placement, seconds, strict=True):
        for device in own:
            busiest[device] += sum(took)
            updates[device] += assessor.update_s(mask, own)
    return max(end + update for end, update in zip(free, updates, strict=True)) + (every - count) * max(busiest)


Needs = list[list[list[tuple[int, float]]]]
"""[way][stage]: the stages whose passes it waits for, and the seconds from the end of theirs to its own."""


def _needs(assessor: Assessor, parts: Parts, placement: Placement, b: int, nexts: Sequence[Sequence[int]]) -> Needs:
    out: Needs = [[[] for _ in parts] for _ in (FORWARDS, BACKWARDS)]
    for s, (mask, _) in enumerate(parts):
        readers = [(parts[t][0], placement[t]) for t in nexts[s]]
        for t, (ahead, back) in zip(nexts[s], assessor.transfers_s(mask, placement[s], readers, b), strict=True):
            near = placement[s] == placement[t]
            out[FORWARDS][t].append((s, 0.0 if near else ahead))
            if back > float("-inf"):
                out[BACKWARDS][s].append((t, 0.0 if near else back))
    return out


def _order(ahead: int, count: int) -> list[tuple[int, int]]:
    """The passes of a stage: forwards ahead, then one backward and one forward in turn."""
    out = [(FORWARDS, m) for m in range(ahead)]
    for m in range(count):
        out.append((BACKWARDS, m))
        if m + ahead < count:
            out.append((FORWARDS, m + ahead))
    return out
