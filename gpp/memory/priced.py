"""A problem in which memory has a price, so that planners weigh it without knowing of it.

At a price of p seconds for a byte each operator runs in its cheapest way,

    keep       p s                      s = the bytes that it keeps for a sample
    recompute  f + p i                  f = seconds of its forward, i = the bytes that it then has to keep of what it reads
    offload    max(0, s / h - f - b)    h = bandwidth to the host, b = seconds of its backward

and the graph and the times are changed accordingly: what it keeps, and how long its backward takes. Both stay sums over operators,
so every planner's tables go on as they are. It is a view to search on. What a stage really keeps, which depends on its neighbours
and on its micro-batches in flight, is decided for each candidate by `gpp.memory.fit`.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Literal, final

import numpy as np

from gpp.cluster import Device
from gpp.cost.models.base import AbstractCostModel, OpTimes
from gpp.cost.problem import Problem
from gpp.graph.op_graph import OpGraph

Way = Literal["recompute", "offload"]
"""How an operator may spare memory."""

PRICES = 8
"""Views of a problem that are searched at most, its own and the one in which memory is free included."""

MARGIN = 1e-3
"""Share of its time by which a plan may be longer than one with endless memory and no search go on."""


@final
@dataclass(frozen=True, slots=True)
class _Again(AbstractCostModel):
    """Times of a graph some of whose operators are computed again before their backwards."""

    problem: Problem
    added: np.ndarray
    """[num_ops] share of an operator's forward that its backward takes in addition."""

    def op_times(self, graph: OpGraph, samples: int, device: Device, degree: int = 1) -> OpTimes:
        times = self.problem.cost.op_times(self.problem.graph, samples, device, degree)
        return replace(times, backward_s=times.backward_s + self.added * times.forward_s)

    def update_s(self, num_bytes: float, device: Device) -> float:
        return self.problem.cost.update_s(num_bytes, device)

    def move_s(self, num_bytes: float, device: Device) -> float:
        return self.problem.cost.move_s(num_bytes, device)

    def launch_s(self, device: Device) -> float:
        return self.problem.cost.launch_s(device)


class Priced:
    """The views of one problem.

    Args:
        ways: those that operators may take.
        again: whether operators that read trained weights may be computed again.
    """

    def __init__(self, problem: Problem, ways: Collection[Way], *, again: bool) -> None:
        self.problem, self.ways = problem, frozenset(ways)
        graph, sizes = problem.graph, problem.microbatch_sizes()
        samples = sizes[len(sizes) // 2]
        times = problem.op_times(samples, 0)
        able = graph.amounts.differentiated
        self._saved = np.where(able, graph.amounts.saved_bytes, 0.0)
        self._read = np.array([_read_bytes(graph, op) for op in range(graph.num_ops)])
        self._forward_s = times.forward_s / samples
        self._again = able & (self._saved > 0) & (again | ~graph.amounts.trains)
        bandwidth = min((device.host_bandwidth_bytes_per_s or 0.0 for device in problem.cluster.devices), default=0.0)
        hidden = times.forward_s + times.backward_s
        self._host_s = np.full(graph.num_ops, math.inf)
        if bandwidth and "offload" in self.ways:
            self._host_s = np.maximum(self._saved / bandwidth - hidden / samples, 0.0)
        if "recompute" not in self.ways:
            self._again = np.zeros(graph.num_ops, dtype=bool)

    def prices(self) -> list[float]:
        """Prices at which operators change their way, from low to high: a few of them, and infinity."""
        spared = np.where(self._again, self._saved - self._read, 0.0)
        with np.errstate(divide="ignore", invalid="ignore"):
            turns = np.concatenate([self._forward_s / spared, self._host_s / self._saved])
        turns = np.unique(turns[np.isfinite(turns) & (turns >= 0)])
        if not len(turns):
            return []
        found = np.quantile(turns, np.linspace(0.0, 1.0, PRICES - 2)[:-1], method="higher")
        return [*dict.fromkeys((found * (1 + 1e-9)).tolist()), math.inf]

    def at(self, price_s: float) -> Problem:
        """The problem at a price, in seconds for a byte."""
        costs = np.stack([self._cost(0.0, self._saved, price_s), self._cost(self._forward_s, self._read, price_s), self._host_s])
        costs[1][~self._again] = math.inf
        chosen = costs.argmin(axis=0)
        return self._view(chosen == 1, chosen == 2)

    @staticmethod
    def _cost(seconds: np.ndarray | float, held: np.ndarray, price_s: float) -> np.ndarray:
        return seconds + (np.where(held > 0, math.inf, 0.0) if math.isinf(price_s) else price_s * held)

    def _view(self, again: np.ndarray, hosted: np.ndarray) -> Problem:
        graph, gone = self.problem.graph, again | hosted
        # What an operator that is computed again reads of one that is not must be there.
        read = {
            i for i, t in enumerate(graph.tensors) if not t.saved and not again[t.producer] and any(again[c] for c in t.consumers)
        }
        kept = [0.0 if gone[i] else op.saved_bytes for i, op in enumerate(graph.ops)]
        for i in read:
            tensor = graph.tensors[i]
            kept[tensor.producer] += 0.0 if hosted[tensor.producer] else tensor.bytes_per_sample
        ops = tuple(
            replace(op, saved_bytes=size, transient_bytes=op.transient_bytes + (op.saved_bytes if missing else 0.0))
            for op, size, missing in zip(graph.ops, kept, gone.tolist(), strict=True)
        )
        tensors = tuple(replace(t, saved=True) if i in read else t for i, t in enumerate(graph.tensors))
        cost = _Again(self.problem, again.astype(float))
        return replace(self.problem, graph=replace(graph, ops=ops, tensors=tensors), cost=cost)


def _read_bytes(graph: OpGraph, op: int) -> float:
    """Bytes per sample of what an operator reads and nobody keeps."""
    return sum(t.bytes_per_sample for i in graph.tensors_of[op] if (t := graph.tensors[i]).producer != op and not t.saved)
