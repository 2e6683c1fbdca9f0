"""Sums over sets of operators as array operations: the parameters, activations and messages of a set, from its mask.

Planners need these sums for thousands of sets; a Python loop over operators and tensors would take most of their time.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gpp.graph.op_graph import OpGraph, bits
from gpp.graph.transients import TransientLine, Transients


class SetSums(NamedTuple):
    """Amounts of one set of operators, bytes; activations per sample.

    Args:
        trainable, frozen: parameters that the set reads, each counted once.
        rows: user inputs and targets that it reads, each counted once, bytes per sample.
        saved: activations that its operators save.
        kept: further activations that are held: tensors that come in, and tensors that go out and are not saved.
        transient: of one micro-batch, beyond that: the operators' own at the fullest moment, and gradients at the boundary.
        fixed: the same at any number of samples.
        incoming, outgoing: forward bytes over the boundary.
        incoming_back, outgoing_back: those of the bytes whose gradients come back.
        num_tensors: tensors over the boundary.
        late: activations and gradients that are held until those of weights are made, where a backward leaves them for later.
    """

    trainable: float
    frozen: float
    rows: float
    saved: float
    kept: float
    transient: float
    fixed: float
    incoming: float
    outgoing: float
    incoming_back: float
    outgoing_back: float
    num_tensors: int
    late: float


class OpSums:
    """The arrays of one graph."""

    def __init__(self, graph: OpGraph) -> None:
        self._num_bytes = (graph.num_ops + 7) // 8
        self._num_ops = graph.num_ops
        self._saved = np.array([op.saved_bytes for op in graph.ops])
        self._late = np.array([op.late_bytes for op in graph.ops])
        self._transients = Transients(graph)
        tensors = [t for t in graph.tensors if t.consumers]
        self._producer = np.array([t.producer for t in tensors], int)
        self._consumers, self._first = _rows([t.consumers for t in tensors])
        self._size = np.array([t.bytes_per_sample for t in tensors], float)
        self._unsaved = np.array([0.0 if t.saved else t.bytes_per_sample for t in tensors])
        self._back = np.array([t.bytes_per_sample * t.differentiable for t in tensors], float)
        read = [(p.num_bytes, p.trainable, readers) for p in graph.params if (readers := tuple(bits(graph.readers[p.name])))]
        self._readers, self._first_reader = _rows([readers for *_, readers in read])
        self._trainable = np.array([size * trains for size, trains, _ in read], float)
        self._frozen = np.array([size * (not trains) for size, trains, _ in read], float)
        self._row_bytes = np.array([size for size, _ in graph.rows], float)
        self._row_readers, self._first_row = _rows([tuple(bits(mask)) for _, mask in graph.rows])

    def members(self, mask: int) -> np.ndarray:
        """The membership of each operator in a set: bool, shape [num_ops]."""
        packed = np.frombuffer(mask.to_bytes(self._num_bytes, "little"), np.uint8)
        return np.unpackbits(packed, count=self._num_ops, bitorder="little").view(bool)

    def params(self, members: np.ndarray) -> tuple[float, float]:
        """Bytes of trainable and of frozen parameters that a set reads."""
        if not len(self._readers):
            return 0.0, 0.0
        reads = np.logical_or.reduceat(members[self._readers], self._first_reader)
        return float(self._trainable[reads].sum()), float(self._frozen[reads].sum())

    def rows(self, members: np.ndarray) -> float:
        """Bytes per sample of the user inputs that a set reads."""
        if not len(self._row_readers):
            return 0.0
        return float(self._row_bytes[np.logical_or.reduceat(members[self._row_readers], self._first_row)].sum())

    def of(self, mask: int) -> SetSums:
        """The sums of one set."""
        members = self.members(mask)
        trainable, frozen = self.params(members)
        rows, saved, late = self.rows(members), float(self._saved[members].sum()), float(self._late[members].sum())
        inside = TransientLine(*(float(values[0]) for values in self._transients.of(members[None])))
        if not len(self._producer):
            return SetSums(trainable, frozen, rows, saved, 0.0, inside.slope, inside.fixed, 0.0, 0.0, 0.0, 0.0, 0, late)
        made, reads = members[self._producer], members[self._consumers]
        into = ~made & np.logical_or.reduceat(reads, self._first)
        out = made & ~np.logical_and.reduceat(reads, self._first)
        incoming, incoming_back = float(self._size[into].sum()), float(self._back[into].sum())
        outgoing, outgoing_back = float(self._size[out].sum()), float(self._back[out].sum())
        transient = inside.within(incoming_back, outgoing_back)
        return SetSums(
            trainable,
            frozen,
            rows,
            saved,
            incoming + float(self._unsaved[out].sum()),
            float(transient.slope),
            float(transient.fixed),
            incoming,
            outgoing,
            incoming_back,
            outgoing_back,
            int(into.sum() + out.sum()),
            late,
        )

    def transient(self, mask: int, samples: int) -> float:
        """Bytes that the operators of a set take beyond what it keeps, with so many samples, gradients at its boundary aside."""
        return self._transients.most(self.members(mask), samples)


def _rows(lists: list[tuple[int, ...]]) -> tuple[np.ndarray, np.ndarray]:
    """Lists one after the other, none of them empty, and the position at which each begins."""
    starts = np.cumsum([0, *(len(items) for items in lists)])[:-1]
    return np.array([item for items in lists for item in items], int), starts
