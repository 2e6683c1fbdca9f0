"""Which operators of a stage to recompute so that it fits: Piper's greedy choice, for many stages at once.

Starting from the fastest way to run every operator, operators change to their way that needs less memory, cheapest seconds for
each byte first, until enough is saved. The last change may save more than needed; the choice is a heuristic when memory binds.
"""

from __future__ import annotations

import numpy as np

TINY_BYTES = 1e-9
CHUNK = 1 << 13


def changes(added_s: np.ndarray, saved_bytes: np.ndarray) -> np.ndarray:
    """Operators worth changing, in the order in which they are changed.

    Args:
        added_s: [num_ops] seconds that the other way of each operator costs.
        saved_bytes: [num_ops] bytes that it saves; at most zero where there is none.
    """
    useful = np.flatnonzero(saved_bytes > TINY_BYTES)
    return useful[np.lexsort((useful, added_s[useful] / saved_bytes[useful]))]


def squeeze(
    members: np.ndarray,
    kept: np.ndarray,
    fixed: np.ndarray,
    depths: list[int],
    added_s: np.ndarray,
    spared: np.ndarray,
    again: np.ndarray,
) -> np.ndarray:
    """[num_depths, num_stages] seconds that the changes add; infinite where even all of them do not save enough.

    Args:
        members: [num_stages, num_ops] whether a stage holds an operator.
        kept, fixed: [num_stages] a stage of depth y has `kept * y + fixed` bytes too many.
        depths: numbers of micro-batches in flight, ascending.
        spared, again: [num_ops] changing an operator saves `spared * y - again` bytes, and `spared` is at most what it kept.
    """
    out = np.zeros((len(depths), len(members)))
    # What does not fit at the smallest depth with everything changed fits at none.
    most = members @ np.maximum(spared * depths[0] - again, 0.0)
    hopeless = kept * depths[0] + fixed - most >= TINY_BYTES
    out[:, hopeless] = np.inf
    open_stages = np.flatnonzero(~hopeless & (kept * depths[-1] + fixed > 0))
    for begin in range(0, len(open_stages), CHUNK):
        part = open_stages[begin : begin + CHUNK]
        out[:, part] = _squeeze(members[part], kept[part], fixed[part], depths, added_s, spared, again)
    return out


def _squeeze(
    members: np.ndarray,
    kept: np.ndarray,
    fixed: np.ndarray,
    depths: list[int],
    added_s: np.ndarray,
    spared: np.ndarray,
    again: np.ndarray,
) -> np.ndarray:
    out = np.zeros((len(depths), len(members)))
    order, alike = np.arange(0), np.array_equal(spared, again)
    seconds = spares = agains = np.zeros((0, 0))
    for row, y in zip(out, depths, strict=True):
        lacking = kept * y + fixed
        now = np.flatnonzero(lacking > 0)
        if not len(now):
            continue
        new = changes(added_s, spared * y - again)
        if not len(new):
            row[now] = np.inf
            continue
        if not np.array_equal(new, order):
            order, held = new, members[:, new]
            seconds, spares = (np.cumsum(held * values[order], axis=1) for values in (added_s, spared))
            agains = spares if alike else np.cumsum(held * again[order], axis=1)
        hopeless = lacking[now] - (spares[now, -1] * y - agains[now, -1]) >= TINY_BYTES
        row[now[hopeless]] = np.inf
        now = now[~hopeless]
        # Savings never fall along the order, so those that do not suffice come first.
        saved = spares[now] * (y - 1) if alike else spares[now] * y - agains[now]
        short = (lacking[now, None] - saved >= TINY_BYTES).sum(axis=1)
        row[now] = seconds[now, np.minimum(short, len(order) - 1)]
    return out


def changed(ops: list[int], lacking: float, order: np.ndarray, saved_bytes: np.ndarray) -> tuple[int, ...]:
    """The operators of one stage that `squeeze` changes, ascending."""
    inside, out = set(ops), []
    for op in order.tolist():
        if lacking < TINY_BYTES:
            break
        if op in inside:
            out.append(op)
            lacking -= float(saved_bytes[op])
    return tuple(sorted(out))
