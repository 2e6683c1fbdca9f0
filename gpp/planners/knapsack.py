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
        depths: numbers of micro-batches in flight.
        spared, again: [num_ops] changing an operator saves `spared * y - again` bytes.
    """
    out = np.zeros((len(depths), len(members)))
    for begin in range(0, len(members), CHUNK):
        part = slice(begin, begin + CHUNK)
        order = np.arange(0)
        sums: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None
        for row, y in zip(out, depths, strict=True):
            lacking = kept[part] * y + fixed[part]
            now = np.flatnonzero(lacking > 0)
            if not len(now):
                continue
            new = changes(added_s, spared * y - again)
            if not len(new):
                row[begin + now] = np.inf
                continue
            if sums is None or not np.array_equal(new, order):
                order = new
                held = members[part][:, order]
                sums = tuple(np.cumsum(held * values[order], axis=1) for values in (added_s, spared, again))  # pyright: ignore[reportAssignmentType]
            assert sums is not None
            seconds, spares, agains = sums
            # Savings never fall along the order, so those that do not suffice come first.
            hopeless = lacking[now] - (spares[now, -1] * y - agains[now, -1]) >= TINY_BYTES
            row[begin + now[hopeless]] = np.inf
            now = now[~hopeless]
            short = (lacking[now, None] - (spares[now] * y - agains[now]) >= TINY_BYTES).sum(axis=1)
            row[begin + now] = seconds[now, short]
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
