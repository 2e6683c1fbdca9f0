"""What sets of operators take while they run, beyond what they keep.

Operators run in the order of their numbers, forwards; backwards the other way round, and what an operator saved is freed
behind it. So at operator v all is there that the operators up to v save, and v's own transients; in the forward what
comes after v is not there yet. With b samples both passes are fullest at the largest of

    f_v(b) = b * (transient_bytes[v] - sum of saved_bytes[w] over the w of the set that come after v) + fixed_bytes[v]

counted beyond everything that the set saves. A line stands for all of these lines: its slope T is the steepest one's, and at
one sample it has the largest value U, so it is exact there and below none of them at any larger number of samples. Groups of
operators compose in the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from gpp.graph.op_graph import Op, OpGraph


class Line(NamedTuple):
    """Transient bytes of sets of operators; numbers, or arrays of one element for each set.

    Args:
        slope: bytes per sample.
        first: bytes with one sample.
    """

    slope: Any
    first: Any

    @property
    def fixed(self) -> Any:
        """Bytes at any number of samples; no less than zero for want of a digit."""
        return np.maximum(self.first - self.slope, 0.0)

    def within(self, incoming: Any, outgoing: Any) -> Line:
        """Those of a stage: gradients of what goes out are there during the whole backward, those of what came in at its end.

        Args:
            incoming, outgoing: gradients at the boundary, bytes per sample.
        """
        return Line(outgoing + np.maximum(self.slope, incoming), outgoing + np.maximum(self.first, incoming))


class Transients:
    """The arrays of one graph."""

    def __init__(self, graph: OpGraph) -> None:
        self._own, self._saved, self._fixed = _columns(graph.ops)
        self._any = bool(self._own.any() or self._fixed.any())

    def of(self, members: np.ndarray) -> Line:
        """Lines of many sets.

        Args:
            members: [sets, num_ops] bool.
        """
        if not self._any:
            return Line(np.zeros(len(members)), np.zeros(len(members)))
        saved = members * self._saved
        after = np.cumsum(saved[:, ::-1], axis=1)[:, ::-1] - saved
        slopes = np.where(members, self._own - after, 0.0)
        return Line(slopes.max(axis=1, initial=0.0), (slopes + members * self._fixed).max(axis=1, initial=0.0))

    def of_intervals(self, order: Sequence[int]) -> Line:
        """Lines of every interval [i, j) of a linear order: arrays of shape [num_ops + 1, num_ops + 1]."""
        n = len(order)
        slope, first = np.zeros((2, n + 1, n + 1))
        if not self._any:
            return Line(slope, first)
        ids = np.array(order)
        later = (ids > ids[:, None]) * self._saved[ids]
        after = np.concatenate([np.zeros((n, 1)), later.cumsum(axis=1)], axis=1)
        for p, op in enumerate(order):
            box = (slice(0, p + 1), slice(p + 1, n + 1))
            own = after[p, : p + 1, None] + (self._own[op] - after[p, None, p + 1 :])
            np.maximum(slope[box], own, out=slope[box])
            np.maximum(first[box], own + self._fixed[op], out=first[box])
        return Line(slope, first)


def grouped(ops: Sequence[Op]) -> Line:
    """The line of one operator made of several, given in their order."""
    own, saved, fixed = _columns(ops)
    slopes = own - (saved.sum() - np.cumsum(saved))
    return Line(float(slopes.max(initial=0.0)), float((slopes + fixed).max(initial=0.0)))


def _columns(ops: Sequence[Op]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rows = np.array([(op.transient_bytes, op.saved_bytes, op.fixed_bytes) for op in ops], dtype=float).reshape(-1, 3)
    return rows[:, 0], rows[:, 1], rows[:, 2]
