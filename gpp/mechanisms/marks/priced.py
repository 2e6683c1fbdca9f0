"""A problem in which memory has a price, so that planners weigh it without knowing of it.

At a price of p seconds for a byte each operator that may be computed again runs in its cheaper way,

    keep       p s        s = the bytes that it keeps for a sample
    recompute  f + p i    f = seconds of its forward, i = the bytes of what it reads that nobody keeps otherwise

and the graph and the times are changed accordingly: what it keeps, and how long its backward takes. Both stay sums over operators,
so every planner's tables go on as they are. In one more view every operator is a boundary: what it hands on is kept, and the rest
is made again for it alone. In another one everything is on the host, and what of its copy exceeds an operator's own passes takes
time. They are views to search on. What a stage really keeps, which depends on its neighbours and on its
micro-batches in flight, is decided for each candidate by `gpp.mechanisms.marks.fit`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Literal, final

import numpy as np

from gpp.cluster import Device
from gpp.cost.models.base import AbstractDerived, OpTimes
from gpp.cost.problem import Problem
from gpp.graph.op_graph import OpGraph

Selection = Literal["least", "capuchin"]
"""Of the marks with which a stage fits, those that add the fewest seconds, or the published greedy's."""

PRICES = 5
"""Prices at which a problem is searched, infinity included."""


@final
@dataclass(frozen=True, slots=True)
class _Sparing(AbstractDerived):
    """Times of a graph some of whose operators are computed again before their backwards, or come from the host.

    Args:
        graph: as it is without that.
        added: [num_ops] share of an operator's forward that its backward takes in addition.
        late_s: [num_ops] seconds for a sample that its backward waits.
    """

    graph: OpGraph
    added: np.ndarray
    late_s: np.ndarray

    def op_times(self, graph: OpGraph, samples: int, device: Device, degree: int = 1) -> OpTimes:
        times = self.cost.op_times(self.graph, samples, device, degree)
        return replace(times, backward_s=times.backward_s + self.added * times.forward_s + self.late_s * samples)


class Priced:
    """The views of one problem.

    Args:
        ways: those that operators may take, of `recompute` and `offload`.
        again: whether operators that read trained weights may be computed again.
    """

    def __init__(self, problem: Problem, ways: Collection[str], *, again: bool) -> None:
        self.problem, self.ways = problem, frozenset(ways)
        graph, sizes = problem.graph, problem.microbatch_sizes()
        samples = sizes[len(sizes) // 2]
        times = problem.op_times(samples, 0)
        self._saved = np.where(graph.amounts.differentiated, graph.amounts.saved_bytes, 0.0)
        self._read = np.array([_read_bytes(graph, op) for op in range(graph.num_ops)])
        self._forward_s, self._own_s = times.forward_s / samples, (times.forward_s + times.backward_s) / samples
        self._again = (self._saved > 0) & (again | ~graph.amounts.trains)
        handed = np.zeros(graph.num_ops)
        for tensor in graph.tensors:
            handed[tensor.producer] += tensor.bytes_per_sample * tensor.saved
        self._hidden = np.where(self._again, np.maximum(self._saved - handed, 0.0), 0.0)

    def views(self) -> Iterator[Problem]:
        """The problem with endless memory, at a few prices from low to high, and with everything on the host."""
        yield self.problem.with_endless_memory
        nothing = np.zeros(self.problem.graph.num_ops)
        if "recompute" in self.ways:
            seen: set[bytes] = set()
            for price_s in self._prices():
                again = self._again
                if math.isfinite(price_s):
                    again = again & (self._forward_s + price_s * self._read < price_s * self._saved)
                if again.tobytes() not in seen:
                    seen.add(again.tobytes())
                    yield self._view(again, nothing > 0, again.astype(float), nothing)
            if self._hidden.any():
                yield self._parted()
        slowest = [
            d.host_sharers / d.host_bandwidth_bytes_per_s for d in self.problem.cluster.devices if d.host_bandwidth_bytes_per_s
        ]
        if "offload" in self.ways and slowest:
            late_s = np.maximum(self._saved * max(slowest) - self._own_s, 0.0)
            yield self._view(nothing > 0, self._saved > 0, nothing, late_s)

    def _prices(self) -> list[float]:
        """Prices at which operators change their way: a few of them, and infinity."""
        with np.errstate(divide="ignore", invalid="ignore"):
            turns = self._forward_s / np.where(self._again, self._saved - self._read, 0.0)
        turns = np.unique(turns[np.isfinite(turns) & (turns >= 0)])
        if not len(turns):
            return [math.inf]
        return [*(np.quantile(turns, np.linspace(0.0, 1.0, PRICES)[:-1], method="higher") * (1 + 1e-9)).tolist(), math.inf]

    def _parted(self) -> Problem:
        """The view in which every operator that keeps more than it hands on is a boundary."""
        graph = self.problem.graph
        ops = tuple(
            replace(op, saved_bytes=op.saved_bytes - hidden, transient_bytes=op.transient_bytes + hidden)
            for op, hidden in zip(graph.ops, self._hidden.tolist(), strict=True)
        )
        cost = _Sparing(self.problem.cost, graph, (self._hidden > 0).astype(float), np.zeros(graph.num_ops))
        return replace(self.problem, graph=replace(graph, ops=ops), cost=cost)

    def _view(self, again: np.ndarray, hosted: np.ndarray, added: np.ndarray, late_s: np.ndarray) -> Problem:
        graph, gone = self.problem.graph, again | hosted
        # What an operator that is computed again reads of one that is not must be there.
        read = {
            i for i, t in enumerate(graph.tensors) if not t.saved and not gone[t.producer] and any(again[c] for c in t.consumers)
        }
        kept = [0.0 if gone[i] else op.saved_bytes for i, op in enumerate(graph.ops)]
        for i in read:
            kept[graph.tensors[i].producer] += graph.tensors[i].bytes_per_sample
        ops = tuple(
            replace(op, saved_bytes=size, again_bytes=op.saved_bytes if missing else 0.0)
            for op, size, missing in zip(graph.ops, kept, gone.tolist(), strict=True)
        )
        tensors = tuple(replace(t, saved=True) if i in read else t for i, t in enumerate(graph.tensors))
        return replace(
            self.problem, graph=replace(graph, ops=ops, tensors=tensors), cost=_Sparing(self.problem.cost, graph, added, late_s)
        )


def _read_bytes(graph: OpGraph, op: int) -> float:
    """Bytes per sample of what an operator reads and nobody keeps."""
    return sum(t.bytes_per_sample for i in graph.tensors_of[op] if (t := graph.tensors[i]).producer != op and not t.saved)
