"""Every way to treat the operators of a stage, each judged by the rule written down once more.

Nothing of `gpp.mechanisms.marks` or of the bill is asked: runs, what they keep alive and what is held for them are found
here from sets of operators, and seconds from the tables of single operators.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from gpp.cost.problem import Problem
from gpp.graph.op_graph import Tensor

KEEP, AGAIN, HOST, END = "kept", "again", "host", "end"
"""Of an `END`, which is computed again, the outputs stay."""


@dataclass(frozen=True, slots=True)
class Marked:
    """One way: its seconds for each micro-batch, and the most bytes on a device at a time."""

    seconds: float
    peak: float
    ways: tuple[str, ...]


@dataclass(slots=True)
class Markings:
    """The ways of one stage, whose devices share each micro-batch.

    Args:
        held: micro-batches in flight.
        samples: of a micro-batch on each device.
    """

    problem: Problem
    ops: tuple[int, ...]
    devices: tuple[int, ...]
    held: int
    samples: int

    def all(self, able: tuple[str, ...]) -> Iterator[Marked]:
        """Each way that is possible, with any number of marks; boundaries only where they let go of something and part a run."""
        read = {t.producer for t in self.problem.graph.tensors if {*t.consumers} & {*self.ops}}
        parting = {op for op in read & {*self.ops} if self._lost(op, {op: END}) > 0}
        each = [[way for way in able if way != END or op in parting] for op in self.ops]
        for ways in product(*each):
            found = self.judged(ways)
            if found is not None:
                yield found

    def judged(self, ways: tuple[str, ...]) -> Marked | None:
        """One way; None if the host has no room."""
        way = dict(zip(self.ops, ways, strict=True))
        tensors = self.problem.graph.tensors
        if set(ways) == {KEEP}:
            return Marked(self._seconds(set(), 0.0), self._kept_peak(), ways)
        groups = [self._again(group, way) for group in self._groups(way)]
        again = {op for group in groups for op in group}
        holds = {op: self._own(op) - self._lost(op, way) for op in self.ops}
        for t in tensors:
            if t.producer in holds and way[t.producer] != AGAIN and not t.saved and again & {*t.consumers}:
                holds[t.producer] += t.bytes_per_sample
        moved = sum(holds[op] for op in self.ops if way[op] == HOST)
        for device in self.devices:
            room = self.problem.cluster.devices[device].host_memory_bytes
            if room is not None and moved * self.samples * self.held > room * (1 + 1e-9):
                return None
        kept = sum(holds.values()) - moved + sum(t.bytes_per_sample for t in self._coming())
        sent = sum(t.bytes_per_sample for t in self._going() if not self._is_held(t, way, again))
        moments = [m for op in self.ops for m in self._moments(op, holds, [group for group in groups if group], way)]
        coming = sum(t.bytes_per_sample for t in self._coming() if t.differentiable)
        once = max(coming * self.samples, *(m * self.samples + fixed for m, fixed in moments)) + self.samples * self._back()
        total = self._static() + self.samples * (kept * self.held + moved * min(self.held, 2) + sent) + once
        return Marked(self._seconds(again, moved), total, ways)

    def _own(self, op: int) -> float:
        return self.problem.graph.ops[op].saved_bytes

    def _lost(self, op: int, way: dict[int, str]) -> float:
        """What an operator would hold if it were kept, and does not."""
        if way[op] not in (AGAIN, END):
            return 0.0
        stays = sum(t.bytes_per_sample for t in self.problem.graph.tensors if t.producer == op and t.saved)
        return self._own(op) - (stays if way[op] == END else 0.0)

    def _coming(self) -> list[Tensor]:
        return [t for t in self.problem.graph.tensors if t.producer not in self.ops and {*self.ops} & {*t.consumers}]

    def _going(self) -> list[Tensor]:
        return [t for t in self.problem.graph.tensors if t.producer in self.ops and {*t.consumers} - {*self.ops}]

    @staticmethod
    def _is_held(t: Tensor, way: dict[int, str], again: set[int]) -> bool:
        return way[t.producer] != AGAIN and (t.saved or bool(again & {*t.consumers}))

    def _groups(self, way: dict[int, str]) -> list[set[int]]:
        """Discarded operators, those together that tensors between discarded operators join and that do not stay."""
        gone = {op for op in self.ops if way[op] in (AGAIN, END)}
        groups = [{op} for op in gone]
        for t in self.problem.graph.tensors:
            if t.producer in gone and way[t.producer] == AGAIN:
                ends = {t.producer, *(c for c in t.consumers if c in gone)}
                touched = [group for group in groups if group & ends]
                groups = [group for group in groups if not group & ends] + [set().union(*touched)]
        return groups

    def _again(self, group: set[int], way: dict[int, str]) -> set[int]:
        """Those of a group that are computed again: those that keep something, and what they are made from."""
        graph = self.problem.graph
        found = {op for op in group if self._lost(op, way) > 0}
        gone = {op for op in group if way[op] == AGAIN}
        while True:
            more = {t.producer for t in graph.tensors if t.producer in gone and found & {*t.consumers}} - found
            if not more:
                return found
            found |= more

    def _moments(self, v: int, holds: dict[int, float], groups: list[set[int]], way: dict[int, str]) -> list[tuple[float, float]]:
        """Bytes per sample while v runs back beyond all that is held, and those of weights' gradients: of its own work, and when a
        group is computed again before it."""
        graph, ops = self.problem.graph, {*self.ops}
        there = -sum(holds[w] for w in self.ops if graph.descendants[v] >> w & 1)
        came = 0.0
        for t in graph.tensors:
            behind = [c for c in t.consumers if c in ops and c > v]
            waits = t.producer < v if t.producer in ops else True
            if t.differentiable and behind and waits:
                there += t.bytes_per_sample
            if t.differentiable and behind and t.producer == v:
                came += t.bytes_per_sample
        computing = []
        for group in groups:
            lost = [t for t in graph.tensors if t.producer in group and way[t.producer] == AGAIN]
            asks = {c for t in lost if t.saved for c in t.consumers if c in ops}
            first_asked, last_freed = max(group | asks), min(group)
            if last_freed <= v <= first_asked:
                there += sum(self._lost(w, way) for w in group if w <= v)
            if v == max(group) or (v in asks and v > max(group)):
                computing.append(self._computing(group, way) - sum(self._lost(w, way) for w in group))
        own = graph.ops[v].transient_bytes
        own -= sum(t.bytes_per_sample for t in self._going() if t.producer == v and t.differentiable and not t.saved)
        return [(there + own, self._fixed(v)), *((there + came + more, 0.0) for more in computing)]

    def _fixed(self, v: int) -> float:
        """Bytes at any number of samples; of a weight that is read by others after v too, a gradient waits, and is added to v's."""
        graph = self.problem.graph
        more = 0.0
        for p in (p for p in graph.params if p.trainable):
            readers = {op for op in self.ops if p.name in graph.ops[op].params}
            if any(op > v for op in readers) and any(op <= v for op in readers):
                more += p.num_bytes * (1 + (v in readers))
        return graph.ops[v].fixed_bytes + more

    def _back(self) -> float:
        """Gradients of what leaves the stage, bytes per sample."""
        return sum(t.bytes_per_sample for t in self._going() if t.differentiable)

    def _computing(self, group: set[int], way: dict[int, str]) -> float:
        """The most that a group takes while it is computed again in order; what stays is made twice while its operator runs."""
        graph, most = self.problem.graph, 0.0
        for u in group:
            there = sum(self._lost(w, way) for w in group if w < u) + self._own(u) + graph.ops[u].transient_bytes
            for t in graph.tensors:
                if (
                    t.producer in group
                    and way[t.producer] == AGAIN
                    and t.producer < u
                    and not t.saved
                    and any(c >= u for c in t.consumers if c in group)
                ):
                    there += t.bytes_per_sample
            most = max(most, there)
        return most

    def _once(self, slopes: list[float], firsts: list[float]) -> float:
        """Transient bytes: the steepest line through the most at one sample, gradients at the boundary included."""
        floor = max(0.0, sum(t.bytes_per_sample for t in self._coming() if t.differentiable))
        slope, first = max(floor, *slopes), max(floor, *firsts)
        return self._back() * self.samples + slope * (self.samples - 1) + first

    def _static(self) -> float:
        graph = self.problem.graph
        names = {name for op in self.ops for name in graph.ops[op].params}
        return sum(
            p.num_bytes * (2 + self.problem.optimizer_state_factor if p.trainable else 1) for p in graph.params if p.name in names
        )

    def _kept_peak(self) -> float:
        """Everything kept: what leaves the stage is held too, and gradients under way are not counted (`gpp.graph.transients`)."""
        graph = self.problem.graph
        holds = {op: self._own(op) for op in self.ops}
        kept = sum(holds.values()) + sum(t.bytes_per_sample for t in self._coming())
        kept += sum(t.bytes_per_sample for t in self._going() if not t.saved)
        slopes = []
        for v in self.ops:
            slope = graph.ops[v].transient_bytes - sum(holds[w] for w in self.ops if graph.descendants[v] >> w & 1)
            slopes.append(
                slope - sum(t.bytes_per_sample for t in self._going() if t.producer == v and t.differentiable and not t.saved)
            )
        once = self._once(slopes, [s + self._fixed(v) for s, v in zip(slopes, self.ops, strict=True)])
        return self._static() + kept * self.samples * self.held + once

    def _seconds(self, again: set[int], moved: float) -> float:
        """Forward and backward of the slowest devices, and what of a copy does not hide behind both with everything kept."""
        forward, plain, backward, copy = [], [], [], [0.0]
        for d in self.devices:
            times, device = self.problem.op_times(self.samples, d), self.problem.cluster.devices[d]
            forward.append(sum(float(times.forward_s[op]) for op in self.ops))
            plain.append(sum(float(times.backward_s[op]) for op in self.ops))
            backward.append(plain[-1] + sum(float(times.forward_s[op]) for op in again))
            if moved and device.host_bandwidth_bytes_per_s is not None:
                each = device.host_bandwidth_bytes_per_s / device.host_sharers
                copy.append(device.host_latency_s + moved * self.samples / each)
        return max(forward) + max(backward) + max(0.0, max(copy) - max(forward) - max(plain))
