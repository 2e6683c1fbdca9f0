"""The bytes of sets of operators while they run, beyond what they keep.

In the backward an operator's saved tensors are freed behind it, so when operator v is at work, those of the operators that
follow from it are gone; in the forward they are not there yet. With b samples both passes are fullest at the largest of

    f_v(b) = b * (transient_bytes[v] - sum of saved_bytes[w] over the w of the set that follow from v) + fixed_bytes[v]

counted beyond everything that the set saves. Branches may run in any order, so one frees nothing for the other. Gradients of
what leaves the set are there during the whole backward and are counted with the boundary (`TransientLine.within`). The operator
that they come to first then does not count them again, unless it has saved the tensor: that is held as long, and not freed.

Autograd adds up the gradients of a weight that several operators of a set read before it adds them to the sum of the micro-batches.
They count as fixed bytes (`gradients_waiting`).

Activations that are made again (`again_bytes`, in views of a problem that a memory policy makes) are all there at once, beside
that.

One line stands for all of these lines where stages are tabulated for every number of samples: its slope T is the steepest one's,
and at one sample it has the largest value U, so it is exact there and below none of them at any larger number of samples. Where the
number of samples is known, `Transients.most` says what they take.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from gpp.graph.op_graph import OpGraph, bits, mask_of


class TransientLine(NamedTuple):
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
        return larger(self.first - self.slope, 0.0)

    def within(self, incoming: Any, outgoing: Any) -> TransientLine:
        """Those of a stage: gradients of what goes out are there during the whole backward, those of what came in at its end.

        Args:
            incoming, outgoing: gradients at the boundary, bytes per sample.
        """
        return TransientLine(outgoing + larger(self.slope, incoming), outgoing + larger(self.first, incoming))


def larger(one: Any, other: Any) -> Any:
    """The larger of two numbers, or of arrays one by one."""
    return max(one, other) if isinstance(one, float) else np.maximum(one, other)


class Transients:
    """The arrays of one graph."""

    def __init__(self, graph: OpGraph) -> None:
        rows = np.array([(op.transient_bytes, op.fixed_bytes) for op in graph.ops], dtype=float).reshape(-1, 2)
        self._own, self._fixed = rows[:, 0], rows[:, 1]
        self._again = np.array([op.again_bytes for op in graph.ops])
        self.any, self.shared = bool(rows.any() or self._again.any()), shared_weights(graph)
        if not self.any:
            return
        n, tensors = graph.num_ops, [t for t in graph.tensors if t.consumers and t.differentiable and not t.saved]
        self._after = np.zeros((n, n))  # [w, v]: what w frees before v, in a backward
        for v in range(n):
            after = list(bits(graph.descendants[v]))
            self._after[after, v] = [graph.ops[w].saved_bytes for w in after]
        self._readers, self._gradients = np.zeros((n, len(tensors))), np.zeros((len(tensors), n))
        for i, tensor in enumerate(tensors):
            self._readers[list(tensor.consumers), i] = 1
            self._gradients[i, tensor.producer] = tensor.bytes_per_sample
        self._num_readers = np.array([len(t.consumers) for t in tensors])
        self._tensors = tensors

    def arrays(self) -> dict[str, array[float]]:
        """The arrays that `gpp.graph.totals` reads: what each operator takes, and by pairs what one frees before another."""
        after = self._after if self.any else np.zeros(0)
        named = {"own": self._own, "fixed": self._fixed, "again": self._again, "after": after}
        return {name: array("d", values.astype(float).tobytes()) for name, values in named.items()}

    def of(self, members: np.ndarray) -> TransientLine:
        """Lines of many sets.

        Args:
            members: [sets, num_ops] bool.
        """
        if not self.any:
            return TransientLine(np.zeros(len(members)), np.zeros(len(members)))
        inside = members.astype(float)
        slopes, again = self._slopes(members), inside @ self._again
        fixed = inside * self._fixed + gradients_waiting(self.shared, members)
        return TransientLine(slopes.max(axis=1, initial=0.0) + again, (slopes + fixed).max(axis=1, initial=0.0) + again)

    def most(self, members: np.ndarray, samples: int) -> float:
        """Bytes of one set with so many samples.

        Args:
            members: [num_ops] bool.
        """
        if not self.any:
            return 0.0
        slopes, inside = self._slopes(members[None])[0], members.astype(float)
        fixed = inside * self._fixed + gradients_waiting(self.shared, members[None])[0]
        return float((slopes * samples + fixed).max(initial=0.0) + inside @ self._again * samples)

    def _slopes(self, members: np.ndarray) -> np.ndarray:
        """[sets, num_ops] slope of each operator's line; 0 outside the set."""
        inside = members.astype(float)
        leaving = (inside @ self._readers < self._num_readers) @ self._gradients
        return np.where(members, self._own - inside @ self._after - leaving, 0.0)

    def of_intervals(self, order: Sequence[int]) -> TransientLine:
        """Lines of every interval [i, j) of a linear order: arrays of shape [num_ops + 1, num_ops + 1]."""
        n = len(order)
        slope, first = np.zeros((2, n + 1, n + 1))
        if not self.any:
            return TransientLine(slope, first)
        ids = list(order)
        at = {op: i for i, op in enumerate(order)}
        # [p, x]: what is freed before the operator at p by those that follow from it and lie before x.
        after = np.concatenate([np.zeros((n, 1)), self._after.T[np.ix_(ids, ids)].cumsum(axis=1)], axis=1)
        leaving = np.zeros((n, n + 1))
        for tensor in self._tensors:
            leaving[at[tensor.producer], : max(at[c] for c in tensor.consumers) + 1] += tensor.bytes_per_sample
        for p, op in enumerate(order):
            box = (slice(0, p + 1), slice(p + 1, n + 1))
            own = after[p, : p + 1, None] + (self._own[op] - after[p, None, p + 1 :] - leaving[p, None, p + 1 :])
            np.maximum(slope[box], own, out=slope[box])
            np.maximum(first[box], own + self._fixed[op] + _waiting_in_intervals(self.shared, ids, p), out=first[box])
        if self._again.any():
            prefix = np.concatenate([[0.0], self._again[ids].cumsum()])
            again = np.maximum(prefix[None, :] - prefix[:, None], 0.0)
            slope, first = slope + again, first + again
        return TransientLine(slope, first)


def grouped(graph: OpGraph, ops: Sequence[int]) -> TransientLine:
    """The line of one operator made of several of a graph; gradients of what leaves it are its own."""
    line = TransientLine(0.0, 0.0)
    mask, members = mask_of(ops), np.zeros((1, graph.num_ops), bool)
    members[0, list(ops)] = True
    waiting = gradients_waiting(shared_weights(graph), members)[0]
    for v in ops:
        slope = graph.ops[v].transient_bytes - sum(graph.ops[w].saved_bytes for w in bits(graph.descendants[v] & mask))
        line = TransientLine(max(line.slope, slope), max(line.first, slope + graph.ops[v].fixed_bytes + float(waiting[v])))
    return line


Shared = Sequence[tuple[int, tuple[int, ...]]]
"""Bytes of the trainable parameters that the same several operators read, and these operators, ascending."""


def shared_weights(graph: OpGraph) -> Shared:
    """Those of a graph."""
    sizes = dict[int, int]()
    for param in graph.params:
        readers = graph.readers[param.name]
        if param.trainable and readers.bit_count() > 1:
            sizes[readers] = sizes.get(readers, 0) + param.num_bytes
    return [(size, tuple(bits(readers))) for readers, size in sizes.items()]


def gradients_waiting(shared: Shared, members: np.ndarray) -> np.ndarray:
    """Bytes of gradients that wait, while an operator of a set is at work, for others of the same weight.

    The last reader's gradient waits until the first reader has made its own. Where a reader adds one, the new sum lies beside both.

    Args:
        members: [sets, num_ops] bool.

    Returns:
        [sets, num_ops], 0 outside the set.
    """
    out = np.zeros(members.shape)
    for size, readers in shared:
        met = members[:, readers]
        for at, (reader, after) in enumerate(pairwise(readers), 1):
            waits = met[:, :at].any(axis=1, keepdims=True) & met[:, at:].any(axis=1, keepdims=True)
            held = members[:, reader:after] * (waits * size)
            out[:, reader:after] += held
            out[:, reader] += held[:, 0]
    return out


def _waiting_in_intervals(shared: Shared, order: Sequence[int], place: int) -> np.ndarray | float:
    """`gradients_waiting` for the operator at a place of a linear order, in the intervals [i, j) of which it is one: [i, j]."""
    n, v = len(order), order[place]
    out: np.ndarray | float = 0.0
    begins, ends = np.arange(place + 1)[:, None], np.arange(place + 1, n + 1)[None, :]
    for size, readers in shared:
        places = [order.index(reader) for reader in readers]
        sides = [np.zeros((place + 1, n - place), bool) for _ in range(2)]
        for reader, at in zip(readers, places, strict=True):
            sides[reader > v] |= (begins <= at) & (at < ends)
        out = out + (sides[0] & sides[1]) * size * (1 + (v in readers))
    return out
