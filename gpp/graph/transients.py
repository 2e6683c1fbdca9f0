"""What sets of operators take while they run, beyond what they keep.

Operators run in the order of their numbers, forwards; backwards the other way round, and what an operator saved is freed
behind it. So at operator v all is there that the operators up to v save, and v's own transients; in the forward what
comes after v is not there yet. Both passes are fullest at the largest of

    transient_bytes[v] - sum of saved_bytes[w] over the w of the set that come after v

counted beyond everything that the set saves. Groups of operators compose in the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gpp.graph.op_graph import Op, OpGraph


class Transients:
    """The arrays of one graph."""

    def __init__(self, graph: OpGraph) -> None:
        self._own, self._saved, self._fixed = _columns(graph.ops)

    def of(self, members: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Bytes per sample, and bytes at any number of samples, of many sets.

        Args:
            members: [sets, num_ops] bool.

        Returns:
            Two arrays of shape [sets].
        """
        if not (self._own.any() or self._fixed.any()):
            return np.zeros(len(members)), np.zeros(len(members))
        after = np.cumsum((members * self._saved)[:, ::-1], axis=1)[:, ::-1] - members * self._saved
        fullest = np.where(members, self._own - after, 0.0).max(axis=1, initial=0.0)
        return fullest, (members * self._fixed).max(axis=1, initial=0.0)

    def of_intervals(self, order: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """The same of every interval [i, j) of a linear order; two arrays of shape [num_ops + 1, num_ops + 1]."""
        n = len(order)
        fullest, fixed = np.zeros((2, n + 1, n + 1))
        if not (self._own.any() or self._fixed.any()):
            return fullest, fixed
        ids = np.array(order)
        later = (ids > ids[:, None]) * self._saved[ids]
        after = np.concatenate([np.zeros((n, 1)), later.cumsum(axis=1)], axis=1)
        for p, op in enumerate(order):
            box = (slice(0, p + 1), slice(p + 1, n + 1))
            own = after[p, : p + 1, None] + (self._own[op] - after[p, None, p + 1 :])
            np.maximum(fullest[box], own, out=fullest[box])
            np.maximum(fixed[box], self._fixed[op], out=fixed[box])
        return fullest, fixed


def grouped(ops: Sequence[Op]) -> tuple[float, float]:
    """`transient_bytes` and `fixed_bytes` of one operator made of several, given in their order."""
    own, saved, fixed = _columns(ops)
    after = saved.sum() - np.cumsum(saved)
    return float((own - after).max(initial=0.0)), float(fixed.max(initial=0.0))


def transient(inside: Any, incoming: Any, outgoing: Any) -> Any:
    """Bytes per sample of a stage with its boundary; numbers or arrays.

    Gradients of what goes out are there during the whole backward, those of what came in at its end.

    Args:
        inside: of its operators.
        incoming, outgoing: gradients at the boundary.
    """
    return outgoing + np.maximum(inside, incoming)


def _columns(ops: Sequence[Op]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rows = np.array([(op.transient_bytes, op.saved_bytes, op.fixed_bytes) for op in ops], dtype=float).reshape(-1, 3)
    return rows[:, 0], rows[:, 1], rows[:, 2]
