"""Markings of stages that are no chains: all of them for small stages, and exchanges of single marks for others.

The bill of a whole marking is asked; of a partial one only what is certain: seconds of the operators that are discarded and keep
something, and the bytes of those that are held.

`capuchin` makes Capuchin's greedy choice (Peng et al., ASPLOS 2020), for operators in place of tensors:

* Free time first: of the operators whose copies to the host and back hide behind the passes of others, the largest go to the host.
* When no further copy hides, the operator with the most memory saved per second is next: computed again, or copied at the price of
  what does not hide, whichever takes less time for it. Every choice changes what the others cost, so all are asked anew.

What a choice saves is what the bill says: of the final peak, with all choices made so far.
"""

from __future__ import annotations

from itertools import combinations

import numpy as np

from gpp.mechanisms.marks.choices import HAIR, Choices, Judged, Marking

KEEP, AGAIN, HOST, END = range(4)
COMPUTED = (AGAIN, END)
"""Ways of an operator that is computed again; of an `END`, a boundary, the outputs stay."""

TRIED = 20_000
"""Partial markings after which branch and bound ends with the best marking so far."""

ROUNDS = 20
"""Exchanges at most."""

ASKED = 100
"""Exchanges whose bill is asked before the search ends."""


def _judged(choices: Choices, ways: list[int]) -> Judged:
    """What a way for each operator of the stage costs."""
    pairs = list(zip(choices.stage.ops, ways, strict=True))
    return choices.judge(Marking(*(tuple(op for op, way in pairs if way in asked) for asked in (COMPUTED, (HOST,), (END,)))))


def _changed(ways: list[int], i: int, way: int) -> list[int]:
    return [*ways[:i], way, *ways[i + 1 :]]


def _ways_of(choices: Choices, i: int) -> list[int]:
    """The ways of the operator at a position."""
    again = [AGAIN, *([END] if choices.parting[i] else [])] if choices.recomputes and choices.able[i] else []
    return [KEEP, *again, *([HOST] if choices.offloads else [])]


def branch_and_bound(choices: Choices, limit: float, start: Judged | None) -> Judged | None:
    """The best of all markings, not worse than `start`: one operator is decided after the other, those that hold most first."""
    graph, keeping = choices.problem.graph, choices.keeping
    held = np.array([graph.ops[op].saved_bytes for op in choices.stage.ops])
    order = np.argsort(-held, kind="stable").tolist()
    saved, handed = held.tolist(), choices.tensors.handed.tolist()
    certain_s = (choices.slowest_s * (held > 0) if choices.in_runs else np.zeros(len(held))).tolist()
    room = limit * (1 + HAIR) - keeping.static - keeping.versions
    ways, best, tried = [KEEP] * len(held), start, 0

    def decide(k: int, seconds: float, held: float, moved: float) -> None:
        """Decide the operators from number k of the order on, with what is certain of those before it."""
        nonlocal best, tried
        if tried >= TRIED:
            return
        tried += 1
        residue = float(choices.residue_s(moved)) if moved else 0.0
        if best is not None and seconds + residue >= best.added_s * (1 - HAIR):
            return
        if choices.in_runs and held * choices.samples > room:
            return
        if k == len(order):
            judged = _judged(choices, ways)
            if judged.fits(limit) and (best is None or judged.added_s < best.added_s):
                best = judged
            return
        i = order[k]
        for way in _ways_of(choices, i):
            ways[i] = way
            if way == KEEP:
                decide(k + 1, seconds, held + saved[i] * choices.held, moved)
            elif way in COMPUTED:
                there = handed[i] * choices.held if way == END else 0.0
                decide(k + 1, seconds + certain_s[i], held + there, moved)
            else:
                decide(k + 1, seconds, held + 2 * saved[i], moved + saved[i])
        ways[i] = KEEP

    decide(0, 0.0, 0.0, 0.0)
    return best


def exchanged(choices: Choices, limit: float, *starts: Judged | None) -> Judged | None:
    """The best of some choices, or of everything treated alike, without the marks that are not needed, after exchanges of one
    operator's way, or of two operators' ways with each other, while the seconds fall."""
    fitting = {one.marking: one for one in (*starts, *_everything(choices)) if one and one.fits(limit)}
    best = min((_thinned(choices, limit, one) for one in fitting.values()), default=None)
    if best is None:
        return None
    for _ in range(ROUNDS):
        found = _better(choices, limit, best)
        if found is None:
            break
        best = _thinned(choices, limit, found)
    return best


def _thinned(choices: Choices, limit: float, start: Judged) -> Judged:
    """A marking without those marks that it fits without, the dearest first."""
    seconds, best, ways = choices.slowest_s.tolist(), start, _of(start.marking, choices.stage.ops)
    marked = [i for i, way in enumerate(ways) if way != KEEP]
    for i in sorted(marked, key=lambda i: (-seconds[i] if ways[i] in COMPUTED else 0.0, i)):
        way, ways[i] = ways[i], KEEP
        judged = _judged(choices, ways)
        if judged.fits(limit) and judged.added_s <= best.added_s and any(judged.marking):
            best = judged
        else:
            ways[i] = way
    return best


def _better(choices: Choices, limit: float, best: Judged) -> Judged | None:
    """The first exchange that fits in fewer seconds, those that promise most first."""
    seconds, ways = choices.slowest_s.tolist(), _of(best.marking, choices.stage.ops)
    able = [_ways_of(choices, i) for i in range(len(ways))]
    for tried in (_neighbours(ways, able, seconds), _parted(ways, able, seconds)):
        for _, other in sorted(tried, key=lambda one: one[0])[:ASKED]:
            judged = _judged(choices, other)
            if judged.fits(limit) and judged.added_s < best.added_s * (1 - HAIR):
                return judged
    return None


def _of(marking: Marking, ops: tuple[int, ...]) -> list[int]:
    way = {op: of for of, marked in zip((AGAIN, HOST, END), marking, strict=True) for op in marked}
    return [way.get(op, KEEP) for op in ops]


def _neighbours(ways: list[int], able: list[list[int]], seconds: list[float]) -> list[tuple[float, list[int]]]:
    """Markings with one exchange after which less is computed again or copied, and by how many seconds less, at least roughly."""

    def cost(i: int, way: int) -> float:
        return seconds[i] if way in COMPUTED else 0.0

    out = []
    for i, way in enumerate(ways):
        out += [
            (cost(i, other) - cost(i, way), _changed(ways, i, other))
            for other in able[i]
            if other != way and way != KEEP and other not in COMPUTED
        ]
    for i, j in combinations(range(len(ways)), 2):
        if ways[i] != ways[j] and ways[i] in able[j] and ways[j] in able[i]:
            less = cost(i, ways[j]) + cost(j, ways[i]) - cost(i, ways[i]) - cost(j, ways[j])
            if less < 0:
                swapped = list(ways)
                swapped[i], swapped[j] = ways[j], ways[i]
                out.append((less, swapped))
    return out


def _parted(ways: list[int], able: list[list[int]], seconds: list[float]) -> list[tuple[float, list[int]]]:
    """Markings with one boundary more or less, and another operator that is kept in return."""
    out = []
    for i, way in enumerate(ways):
        other = END if way == AGAIN else AGAIN
        if way in COMPUTED and other in able[i]:
            for j, given in enumerate(ways):
                if j != i and given in COMPUTED and seconds[j] > 0:
                    changed = list(ways)
                    changed[i], changed[j] = other, KEEP
                    out.append((-seconds[j], changed))
    return out


def _everything(choices: Choices) -> list[Judged]:
    """Everything treated in one way as far as it can be."""
    able = [_ways_of(choices, i) for i in range(len(choices.stage.ops))]
    wished = [[way if way in ways else KEEP for ways in able] for way in (AGAIN, HOST)]
    wished.append([END if END in ways else AGAIN if AGAIN in ways else KEEP for ways in able])
    wished.append([HOST if HOST in ways else max(ways) for ways in able])
    return [_judged(choices, ways) for ways in wished]


def capuchin(choices: Choices, limit: float) -> Judged | None:
    """The greedy choice; None if it ends without a fit."""
    ops = choices.stage.ops
    sizes = choices.problem.graph.amounts.saved_bytes[list(ops)].tolist()
    ways, now = [KEEP] * len(ops), choices.judge(Marking())
    for i in sorted(range(len(ops)), key=lambda i: -sizes[i]) if choices.offloads else ():
        if now.fits(limit):
            return now
        tried = _judged(choices, _changed(ways, i, HOST))
        if tried.added_s <= now.added_s and tried.peak < now.peak:
            ways[i], now = HOST, tried
    while not now.fits(limit):
        free = [(i, way) for i in range(len(ops)) if ways[i] == KEEP for way in _ways_of(choices, i) if way in (AGAIN, HOST)]
        tried = [(i, _judged(choices, _changed(ways, i, way))) for i, way in free]
        # A byte less is what counts; where the largest run hides it, the bytes that are held.
        steps = [(_per_second(now, one, sizes[i]), -i, -one.peak, one) for i, one in tried if np.isfinite(one.peak)]
        best = max(steps, key=lambda step: step[:3], default=None)
        if best is None or best[0] <= 0:
            return None
        now = best[-1]
        ways = _of(now.marking, ops)
    return now


def _per_second(now: Judged, then: Judged, size: float) -> float:
    """Bytes per second of added time."""
    less = now.peak - then.peak if now.peak > then.peak else HAIR * size
    return less / max(then.added_s - now.added_s, 1e-15)
