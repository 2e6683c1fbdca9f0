"""Which operators of a stage to recompute so that it fits: Piper's greedy choice, for many stages at once.

Starting from the fastest way to run every operator, operators change to their way that needs less memory, cheapest seconds for
each byte first, until enough is saved. The last change may save more than needed; the choice is a heuristic when memory binds.
"""

from __future__ import annotations

import numpy as np

TINY_BYTES = 1e-9
CHUNK = 1 << 16


def changes(added_s: np.ndarray, saved_bytes: np.ndarray) -> np.ndarray:
    """Operators worth changing, in the order in which they are changed.

    Args:
        added_s: [num_ops] seconds that the other way of each operator costs.
        saved_bytes: [num_ops] bytes that it saves; at most zero where there is none.
    """
    useful = np.flatnonzero(saved_bytes > TINY_BYTES)
    return useful[np.lexsort((useful, added_s[useful] / saved_bytes[useful]))]


def squeeze(members: np.ndarray, lacking: np.ndarray, order: np.ndarray, added_s: np.ndarray, saved_bytes: np.ndarray) -> np.ndarray:
    """[num_stages] seconds that the changes add to each stage; infinite where even all of them do not save enough.

    Args:
        members: [num_stages, num_ops] whether a stage holds an operator.
        lacking: [num_stages] bytes that each stage must save, above zero.
        order: from `changes`.
    """
    out = np.full(len(members), np.inf)
    if not len(order):
        return out
    for begin in range(0, len(members), CHUNK):
        part = slice(begin, begin + CHUNK)
        held = members[part][:, order]
        left = lacking[part, None] - np.cumsum(held * saved_bytes[order], axis=1)
        seconds = np.cumsum(held * added_s[order], axis=1)
        enough = left < TINY_BYTES
        first = enough.argmax(axis=1)
        rows = np.arange(len(held))
        out[part] = np.where(enough[rows, first], seconds[rows, first], np.inf)
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
