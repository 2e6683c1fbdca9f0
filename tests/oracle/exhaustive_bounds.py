"""Lower bounds for the oracle of the tests: stages under every option, whole candidates under every combination.

Vectorised over combinations, and independent of the bounds that the other planners use.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple

import numpy as np

from gpp.cost.problem import Problem
from gpp.graph.op_graph import OpGraph, bits

Masks = tuple[int, ...]

SURELY = 1 - 1e-9
"""Bounds are lowered by more than rounding."""


def sizes(problem: Problem) -> list[int]:
    """Every micro-batch size that can be asked for, whatever planners try: the divisors of the mini-batch, or the imposed one."""
    if problem.microbatch_size is not None:
        return [problem.microbatch_size]
    return [b for b in range(1, problem.minibatch_size + 1) if problem.minibatch_size % b == 0]


class Shape(NamedTuple):
    """A partition in stage order; `nexts` and `depth` with the chain's order edges, `gradients` the edges that return some."""

    masks: Masks
    chain: bool
    nexts: tuple[tuple[int, ...], ...]
    depth: tuple[int, ...]
    crossing: dict[tuple[int, int], tuple[float, float]]

    @classmethod
    def of(cls, graph: OpGraph, masks: Masks, chain: bool) -> Shape | None:
        """None if the stage graph has a cycle."""
        owner = {op: s for s, mask in enumerate(masks) for op in bits(mask)}
        after: list[set[int]] = [set() for _ in masks]
        for tensor in graph.tensors:
            for consumer in tensor.consumers:
                after[owner[tensor.producer]].add(owner[consumer])
        after = [nexts - {s} for s, nexts in enumerate(after)]
        order = list(range(len(masks))) if chain else _sorted(after, masks)
        if order is None:
            return None
        place = {p: s for s, p in enumerate(order)}
        nexts = [{place[q] for q in after[p]} for p in order]
        if chain:
            for s in range(len(masks) - 1):
                nexts[s].add(s + 1)
        depth = [1] * len(masks)
        for s in reversed(range(len(masks))):
            depth[s] += max((depth[t] for t in nexts[s]), default=0)
        # An order is kept backwards too; data without gradients has no way back.
        data = {(place[p], place[q]) for p in order for q in after[p]}
        crossing = {(s, t): (0.0, -np.inf if (s, t) in data else 0.0) for s in range(len(masks)) for t in nexts[s]}
        for tensor in graph.tensors:
            s = place[owner[tensor.producer]]
            for t in {place[owner[c]] for c in tensor.consumers} - {s}:
                forward, back = crossing[s, t]
                size = tensor.bytes_per_sample
                crossing[s, t] = forward + size, max(back, 0.0) + size if tensor.differentiable else back
        return cls(tuple(masks[p] for p in order), chain, tuple(tuple(sorted(n)) for n in nexts), tuple(depth), crossing)


def _sorted(after: list[set[int]], masks: Masks) -> list[int] | None:
    """A topological order, the stage with the smallest operator first; None if there is a cycle."""
    missing = [0] * len(masks)
    for nexts in after:
        for q in nexts:
            missing[q] += 1
    ready = [(mask & -mask, p) for p, mask in enumerate(masks) if not missing[p]]
    heapq.heapify(ready)
    out = []
    while ready:
        p = heapq.heappop(ready)[1]
        out.append(p)
        for q in after[p]:
            missing[q] -= 1
            if not missing[q]:
                heapq.heappush(ready, (masks[q] & -masks[q], q))
    return out if len(out) == len(masks) else None


class _Stage(NamedTuple):
    """A set of operators under every option: seconds of a micro-batch, of what follows the last one; bytes of a replica."""

    forward_s: np.ndarray
    backward_s: np.ndarray
    finish_s: np.ndarray
    fixed: np.ndarray
    per_micro: np.ndarray


class OptionTables:
    """Options of a stage, (micro-batch size, replicas), and bounds of whole candidates under combinations of them."""

    def __init__(self, problem: Problem, options: list[tuple[int, int]], mixed: bool) -> None:
        self.problem, self.options, self.mixed = problem, options, mixed
        cluster = problem.cluster
        self.kinds = sorted(set(problem.type_of_device))
        self.micro = np.array([problem.minibatch_size // b for b, _ in options], dtype=float)
        self.samples = [b // r for b, r in options]
        links = [cluster.intra_node] + [cluster.inter_node] * (len(set(cluster.nodes)) > 1)
        self.latency_s = min(link.latency_s for link in links)
        self.bytes_per_s = max(link.bandwidth_bytes_per_s for link in links)
        self.memory = max(device.memory_bytes for device in cluster.devices)
        times = {q: [problem.op_times(q, kind) for kind in self.kinds] for q in set(self.samples)}
        self._forward = [[t.forward_s.tolist() for t in times[q]] for q in self.samples]
        self._backward = [[t.backward_s.tolist() for t in times[q]] for q in self.samples]
        # Samples of the largest message that a replica receives, at least: by options of sender and receiver.
        self.message = np.array(
            [[q / _senders(s, r) for _, s in options] for (_, r), q in zip(options, self.samples, strict=True)]
        ).T
        self._stages: dict[int, _Stage] = {}

    @classmethod
    def of(cls, problem: Problem, most_replicas: int, mixed: bool) -> OptionTables:
        most = min(most_replicas, problem.cluster.num_devices)
        return cls(problem, [(b, r) for b in sizes(problem) for r in range(1, min(most, b) + 1) if b % r == 0], mixed)

    def combinations(self, count: int, num_devices: int) -> np.ndarray:
        """Rows of options, one for each of `count` stages, that the devices suffice for."""
        out: list[list[int]] = []

        def extend(row: list[int], left: int) -> None:
            if len(row) == count:
                out.append(row)
                return
            for c, (b, r) in enumerate(self.options):
                if r <= left - (count - len(row) - 1) and (self.mixed or not row or b == self.options[row[0]][0]):
                    extend([*row, c], left - r)

        extend([], num_devices)
        return np.array(out, dtype=int).reshape(len(out), count)

    def stage(self, mask: int) -> _Stage:
        if mask not in self._stages:
            problem, cluster, ops = self.problem, self.problem.cluster, list(bits(mask))
            trainable = problem.sums(mask).trainable
            update = min(problem.cost.update_s(trainable, cluster.devices[kind]) for kind in self.kinds)
            _, _, static, kept, once, fixed, *_ = problem.amounts(mask)
            samples = np.array(self.samples)
            self._stages[mask] = _Stage(
                np.array([min(sum(kind[op] for op in ops) for kind in row) for row in self._forward]),
                np.array([min(sum(kind[op] for op in ops) for kind in row) for row in self._backward]),
                np.array([update + self._reduce_s(trainable, r) for _, r in self.options]),
                static + once * samples + fixed,
                kept * samples,
            )
        return self._stages[mask]

    def _reduce_s(self, num_bytes: float, replicas: int) -> float:
        if replicas < 2 or num_bytes <= 0:
            return 0.0
        rate = self.bytes_per_s * self.problem.cluster.collective_efficiency
        return 2 * (replicas - 1) * (self.latency_s + num_bytes / replicas / rate)

    def bounds_s(self, shape: Shape, combos: np.ndarray) -> np.ndarray:
        """No plan of the shape takes less, for every row of options; infinite where the memory surely does not suffice.

        At every stage: its micro-batches, and its own reduction and update, or the way from another stage to it and back, which is
        followed by the other stage's. Its micro-batches take their time, or as many round trips as those in flight force one
        after the other, or a round trip and all other forwards (backwards).
        """
        count = len(shape.masks)
        option = [combos[:, s] for s in range(count)]
        stages = [self.stage(mask) for mask in shape.masks]
        forward = [stages[s].forward_s[option[s]] for s in range(count)]
        backward = [stages[s].backward_s[option[s]] for s in range(count)]
        equal = not self.mixed
        out = np.zeros(len(combos))
        way, trip = ([np.zeros(len(combos)) for _ in range(count)] for _ in range(2))
        there, back = {}, {}
        for (s, t), (to, fro) in shape.crossing.items():
            there[s, t] = self.latency_s + (to * self.message[option[s], option[t]] / self.bytes_per_s if equal else 0.0)
            back[s, t] = self.latency_s + (fro * self.message[option[t], option[s]] / self.bytes_per_s if equal else min(fro, 0.0))
        for s in reversed(range(count)):
            for t in shape.nexts[s]:
                if shape.crossing[s, t][1] >= 0:
                    trip[s] = np.maximum(trip[s], trip[t] + there[s, t] + back[s, t])
            trip[s] = trip[s] + forward[s] + backward[s]
        for s in range(count):
            micro = self.micro[option[s]]
            least = micro if self.problem.regime.keeps_all else np.minimum(shape.depth[s], micro) if equal else np.ones(len(combos))
            out[stages[s].fixed[option[s]] + stages[s].per_micro[option[s]] * least > self.memory * (2 - SURELY)] = np.inf
            busy = np.maximum(micro * (forward[s] + backward[s]), (micro - 1) * np.maximum(forward[s], backward[s]) + trip[s])
            if equal:
                busy = np.maximum(busy, np.ceil(micro / least) * trip[s])
            behind = np.maximum(way[s], stages[s].finish_s[option[s]])
            out = np.maximum(out, busy + behind)
            for t in shape.nexts[s]:
                if shape.crossing[s, t][1] >= 0 and self._differentiates(shape.masks[s]) and self._differentiates(shape.masks[t]):
                    way[t] = np.maximum(way[t], behind + forward[s] + backward[s] + there[s, t] + back[s, t])
        return out * SURELY

    def _differentiates(self, mask: int) -> bool:
        graph = self.problem.graph
        return graph.differentiated == graph.all_mask or bool(mask & graph.differentiated)


def _senders(senders: int, receivers: int) -> int:
    """How many messages a replica receives at most for a micro-batch."""
    if receivers % senders == 0:
        return 1
    return senders // receivers + (2 if senders % receivers else 0)
