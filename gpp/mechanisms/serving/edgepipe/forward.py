"""The seconds of stages and messages of a forward pass, on devices and on types of devices, for one micro-batch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations, pairwise

import numpy as np

from gpp.cluster import Cluster, Link
from gpp.cost.problem import Problem
from gpp.graph.op_graph import bits
from gpp.mechanisms.serving.edgepipe.typed_chain import TypedChain
from gpp.planners.common.linear_orders import intervals
from gpp.planners.common.stage_costs import StageCosts

Assigned = tuple[tuple[int, int], ...]
"""(operator mask, device) of each stage, in an order in which messages go forward."""


@dataclass(frozen=True)
class Kinds:
    """Groups of devices that stand for each other.

    Args:
        groups: device numbers of each type, ascending.
    """

    cluster: Cluster
    groups: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, cluster: Cluster) -> Kinds:
        """The finest types: equal devices with equal links to every other device."""
        found: dict[tuple[int, int], list[int]] = {}
        for device, place in enumerate(cluster.wiring.places):
            found.setdefault((cluster.devices.index(cluster.devices[device]), place), []).append(device)
        return cls(cluster, tuple(map(tuple, found.values())))

    @property
    def counts(self) -> tuple[int, ...]:
        return tuple(map(len, self.groups))

    @property
    def num_states(self) -> int:
        """Multisets of used devices, and the type of the next one."""
        return len(self.groups) * math.prod(count + 1 for count in self.counts)

    def joined(self, seconds: list[float], most: int) -> Kinds:
        """Fewer types, so that there are at most so many states: the two whose devices differ least in time become one, repeatedly.

        Args:
            seconds: of the whole model on each device.
        """
        groups = list(self.groups)
        while len(groups) > 1 and Kinds(self.cluster, tuple(groups)).num_states > most:

            def apart(pair: tuple[int, int], groups: list[tuple[int, ...]] = groups) -> float:
                together = [seconds[d] for i in pair for d in groups[i]]
                return max(together) / min(together)

            a, b = min(combinations(range(len(groups)), 2), key=lambda pair: (apart(pair), pair))
            groups[a] = tuple(sorted(groups[a] + groups[b]))
            del groups[b]
        return Kinds(self.cluster, tuple(groups))

    def placed(self, stages: Iterable[tuple[int, int]]) -> Assigned:
        """Stages, each a mask and a type, on the first devices of their types."""
        free = [iter(group) for group in self.groups]
        return tuple((mask, next(free[kind])) for mask, kind in stages)

    def links(self, a: int, b: int) -> tuple[Link, ...]:
        """The links, each once, between a device of one type and another device of the other; none within a type of one device."""
        return self.cluster.wiring.between(self.groups[a], self.groups[b]) if a != b or len(self.groups[a]) > 1 else ()

    def move_s(self, a: int, b: int, num_bytes: float) -> float:
        """Seconds of a message from a device of one type to one of another, over the slowest of their links."""
        return max((link.transfer_s(num_bytes) for link in self.links(a, b)), default=0.0)


@dataclass(frozen=True)
class ForwardProblem:
    """One problem at one micro-batch size.

    Args:
        costs: tables of the problem without replicas.
    """

    problem: Problem
    costs: StageCosts
    microbatch_size: int
    _took: dict[tuple[int, int], float] = field(default_factory=dict, init=False, repr=False, compare=False)
    _sent: dict[tuple[int, int], float] = field(default_factory=dict, init=False, repr=False, compare=False)

    @cached_property
    def seconds(self) -> np.ndarray:
        """[devices, operators] seconds of a forward."""
        devices = range(self.problem.cluster.num_devices)
        return np.stack([self.problem.op_times(self.microbatch_size, device).forward_s for device in devices])

    @property
    def pass_s(self) -> float:
        """Seconds of a pass beside its operators."""
        return self.problem.overheads.forward_s

    def held_bytes(self, mask: int) -> float:
        """Bytes of a set of operators as a stage."""
        return float(self.costs.held(mask, self.microbatch_size).peak(1))

    def fits(self, mask: int, device: int) -> bool:
        return self.held_bytes(mask) <= self.problem.cluster.devices[device].memory_bytes

    def stage_s(self, mask: int, device: int) -> float:
        """Seconds of a stage for one micro-batch."""
        key = mask, device
        if key not in self._took:
            self._took[key] = float(self.seconds[device, list(bits(mask))].sum()) + self.pass_s
        return self._took[key]

    def message_bytes(self, source: int, target: int) -> float:
        """Bytes of a micro-batch that one set of operators hands to another."""
        key = source, target
        if key not in self._sent:
            crossing = self.problem.crossing(source, target)
            self._sent[key] = self.microbatch_size * sum(tensor.bytes_per_sample for tensor in crossing)
        return self._sent[key]

    def times(self, stages: Assigned) -> dict[tuple[int, ...], float]:
        """Seconds of every stage (its number) and of every message (both ends), whether stages fit or not."""
        link = self.problem.cluster.link
        out: dict[tuple[int, ...], float] = {(s,): self.stage_s(mask, device) for s, (mask, device) in enumerate(stages)}
        for s, (source, a) in enumerate(stages):
            for t in range(s + 1, len(stages)):
                target, b = stages[t]
                if num_bytes := self.message_bytes(source, target):
                    out[s, t] = link(a, b).transfer_s(num_bytes)
        return out

    def loads(self, stages: Assigned) -> list[float]:
        """The times of stages and messages, the longest first; infinite where a stage does not fit."""
        lacking = [math.inf for mask, device in stages if not self.fits(mask, device)]
        return lacking + sorted(self.times(stages).values(), reverse=True)

    def bottleneck_s(self, stages: Assigned) -> float:
        """Seconds of the slowest stage or message; infinite where a stage does not fit."""
        return self.loads(stages)[0]

    def slowest(self, stages: Assigned) -> tuple[int, ...]:
        """The stages that decide the bottleneck: those that do not fit, else the slowest one, or both ends of the slowest
        message."""
        lacking = tuple(s for s, (mask, device) in enumerate(stages) if not self.fits(mask, device))
        times = self.times(stages)
        return lacking or max(times, key=lambda key: times[key])

    def chain(self, order: Sequence[int], kinds: Kinds, *, least: bool = False) -> TypedChain:
        """The problem of cutting a linear order, on types of devices.

        A tensor counts at every cut that it crosses: in a graph that is no chain it goes past the stages between at no cost, so
        messages are not underrated. Of a type whose devices differ, the slowest and the smallest stand for all.

        Args:
            least: count at a cut only what the operator before it hands to the one behind it, so that messages are not overrated.
        """
        table, b, order = intervals(self.costs, tuple(order)), self.microbatch_size, list(order)
        held = np.broadcast_to(np.asarray(table.held((slice(None), slice(None)), b).peak(1)), (len(order) + 1,) * 2)
        devices, groups = self.problem.cluster.devices, kinds.groups
        took = [self.seconds[list(group)].max(axis=0)[order] for group in groups]
        crossing = b * (self._neighbouring(order) if least else self._crossing(order))
        pairs = [[kinds.links(u, v) for v in range(len(groups))] for u in range(len(groups))]
        return TypedChain(
            counts=kinds.counts,
            prefix_s=np.stack([np.concatenate([[0.0], np.cumsum(row)]) for row in took]),
            pass_s=self.pass_s,
            fits=np.stack([held <= min(devices[d].memory_bytes for d in group) for group in groups]),
            move_s=np.array([[_move_s(links, crossing) for links in row] for row in pairs]),
        )

    def _crossing(self, order: Sequence[int]) -> np.ndarray:
        """[n + 1] bytes per sample that cross each cut of an order."""
        at = {op: i for i, op in enumerate(order)}
        change = np.zeros(len(order) + 2)
        for tensor in self.problem.graph.tensors:
            if tensor.consumers:
                change[at[tensor.producer] + 1] += tensor.bytes_per_sample
                change[max(at[c] for c in tensor.consumers) + 1] -= tensor.bytes_per_sample
        return np.maximum(np.cumsum(change)[:-1], 0.0)

    def _neighbouring(self, order: Sequence[int]) -> np.ndarray:
        """[n + 1] bytes per sample that the operator before each cut of an order hands to the one behind it."""
        handed = [sum(t.bytes_per_sample for t in self.problem.crossing(1 << a, 1 << b)) for a, b in pairwise(order)]
        return np.array([0.0, *handed, 0.0])


def _move_s(links: Sequence[Link], num_bytes: np.ndarray) -> np.ndarray:
    """Seconds of messages over the slowest of some links; none where there is no link to go over."""
    return np.max([np.zeros_like(num_bytes), *(link.latency_s + num_bytes / link.bandwidth_bytes_per_s for link in links)], axis=0)
