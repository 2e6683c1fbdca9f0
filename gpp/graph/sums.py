"""Sums over sets of operators: the parameters, activations and messages of a set, from its mask.

Planners need these sums for a hundred thousand sets, so `gpp.graph.totals`, which adds them up, is compiled.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple, final

import numpy as np

from gpp.compiled import reals
from gpp.graph.op_graph import OpGraph, bits
from gpp.graph.totals import SetTotals
from gpp.graph.transients import Transients


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
        late: activations and gradients that are held until those of weights are made, where a backward leaves them for later.
        narrow: of the frozen parameters, copies of others in the type of the passes.
        largest: the trainable parameter with most bytes.
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
    late: float
    narrow: float
    largest: float


@final
class GraphNumbers:
    """The arrays of one graph that `gpp.graph.totals` reads; `made` and the like are lists, one for each operator or tensor."""

    def __init__(self, graph: OpGraph, transients: Transients) -> None:
        ops, tensors = graph.ops, [tensor for tensor in graph.tensors if tensor.consumers]
        params = [(param, graph.readers[param.name]) for param in graph.params if graph.readers[param.name]]
        self.num_ops, self.any_transient, of = len(ops), transients.any, transients.arrays()
        self.saved, self.late = (array("d", [getattr(op, name) for op in ops]) for name in ("saved_bytes", "late_bytes"))
        self.own, self.fixed, self.again, self.after = of["own"], of["fixed"], of["again"], of["after"]
        self.producer = array("q", [tensor.producer for tensor in tensors])
        self.size = array("d", [tensor.bytes_per_sample for tensor in tensors])
        self.back = array("d", [tensor.bytes_per_sample * tensor.differentiable for tensor in tensors])
        self.unsaved = array("d", [tensor.bytes_per_sample * (not tensor.saved) for tensor in tensors])
        self.withheld = array("d", [back * (not tensor.saved) for back, tensor in zip(self.back, tensors, strict=True)])
        self.trainable = array("d", [param.num_bytes * param.trainable for param, _ in params])
        self.frozen = array("d", [param.num_bytes * (not param.trainable) for param, _ in params])
        self.narrow = array("d", [param.num_bytes * bool(param.copy_of) for param, _ in params])
        self.row_bytes = array("d", [size for size, _ in graph.rows])
        self.readers = listed([tensor.consumers for tensor in tensors])
        self.made = listed(_turned([(tensor.producer,) for tensor in tensors], len(ops)))
        self.read = listed(_turned([tensor.consumers for tensor in tensors], len(ops)))
        self.params = listed(_turned([bits(readers) for _, readers in params], len(ops)))
        self.rows = listed(_turned([bits(readers) for _, readers in graph.rows], len(ops)))
        self.shared_bytes = array("d", [size for size, _ in transients.shared])
        self.shared = listed([readers for _, readers in transients.shared])


@final
class OpSums:
    """The sums over sets of operators of one graph."""

    def __init__(self, graph: OpGraph) -> None:
        self._num_bytes, self._num_ops = (graph.num_ops + 7) // 8, graph.num_ops
        self._transients = Transients(graph)
        self._found = reals(len(SetSums._fields))
        self._totals = SetTotals(GraphNumbers(graph, self._transients), self._found)

    def of(self, mask: int) -> SetSums:
        """The sums of one set."""
        self._totals.add_up(mask.to_bytes(self._num_bytes, "little"))
        return SetSums._make(self._found)

    def transient(self, mask: int, samples: int) -> float:
        """Bytes that the operators of a set take beyond what it keeps, with so many samples, gradients at its boundary aside."""
        return self._transients.most(self._members(mask), samples)

    def _members(self, mask: int) -> np.ndarray:
        members = np.zeros(self._num_ops, bool)
        members[list(bits(mask))] = True
        return members


def listed(groups: Iterable[Iterable[int]]) -> tuple[array[int], array[int]]:
    """Groups of numbers one after the other: where each begins, and all of them."""
    first, out = [0], list[int]()
    for group in groups:
        out += group
        first.append(len(out))
    return array("q", first), array("q", out)


def _turned(groups: Sequence[Iterable[int]], count: int) -> list[list[int]]:
    """For each of `count` numbers the groups in which it is."""
    out: list[list[int]] = [[] for _ in range(count)]
    for i, group in enumerate(groups):
        for number in group:
            out[number].append(i)
    return out
