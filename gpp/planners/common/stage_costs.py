"""Times and bytes of candidate stages, tabulated: what `Problem` says, fast enough for a search.

A stage of the search is an operator mask with a number of replicas; which devices it will get is not
known yet. On unequal devices the tables therefore hold the slowest device's time and the smallest
device's memory, and on links that differ by more than nodes the mean ones; a finished candidate is
judged on its own devices (see `candidates`).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from gpp.cost.amounts import StageBytes
from gpp.cost.problem import Problem
from gpp.cost.stage import FinishLines
from gpp.graph.op_graph import bits


class StageCosts:
    """Tables of one problem.

    Args:
        replication: whether a stage may have several replicas (every divisor of b up to the devices).
    """

    def __init__(self, problem: Problem, *, replication: bool = True) -> None:
        self.problem, self.replication = problem, replication
        self.graph, self.cluster = problem.graph, problem.cluster
        self.limit_bytes = problem.memory_limit_bytes
        self.microbatch_sizes = problem.microbatch_sizes()
        most = min(self.cluster.num_devices, problem.max_replicas or self.cluster.num_devices) if replication else 1
        self.replicas = {b: tuple(r for r in range(1, min(most, b) + 1) if b % r == 0) for b in self.microbatch_sizes}
        self._row = {s: i for i, s in enumerate(sorted({b // r for b, rs in self.replicas.items() for r in rs}))}
        devices = self.cluster.devices
        kinds = sorted({devices.index(device) for device in devices}) if not self.cluster.homogeneous else [0]
        times = [[problem.op_times(samples, device) for device in kinds] for samples in self._row]
        shape = (len(self._row), self.graph.num_ops)
        self.forward_s = np.array([np.max([t.forward_s for t in row], axis=0) for row in times]).reshape(shape)
        self.backward_s = np.array([np.max([t.backward_s for t in row], axis=0) for row in times]).reshape(shape)
        self._total_s = self.forward_s + self.backward_s
        self.link = self.cluster.wiring.common
        self._even = problem if self.cluster.wiring.by_node else replace(problem, cluster=self.cluster.evened())
        self.of_orders: dict[tuple[int, ...], object] = {}
        self._work: dict[tuple[int, int], float] = {}
        self._compute: dict[int, list[float]] = {}
        self._held: dict[tuple[int, int], StageBytes] = {}
        self._finish: dict[int, FinishLines] = {}

    def labels(self) -> list[tuple[float, ...]]:
        """The labels that tell operators apart in time: their columns of the tables."""
        return [(*self.forward_s[:, op].tolist(), *self.backward_s[:, op].tolist()) for op in range(self.graph.num_ops)]

    def op_seconds(self) -> list[float]:
        """Forward plus backward of each operator for the smallest tabulated micro-batch."""
        return self._total_s[0].tolist()

    def row(self, samples: int) -> int:
        """Row of the tables for a number of samples on one device."""
        return self._row[samples]

    def compute_s(self, mask: int, samples: int) -> float:
        """Forward plus backward seconds of a set for `samples` samples on one device."""
        row = self._compute.get(mask)
        if row is None:
            row = self._compute[mask] = self._total_s[:, list(bits(mask))].sum(axis=1).tolist()
        return row[self._row[samples]]

    def least_work_s(self, mask: int, microbatch_size: int) -> float:
        """Device seconds that a set takes for one micro-batch, whatever the number of replicas."""
        key = (mask, microbatch_size)
        found = self._work.get(key)
        if found is None:
            found = self._work[key] = min(self.compute_s(mask, microbatch_size // r) * r for r in self.replicas[microbatch_size])
        return found

    def held(self, mask: int, samples: int) -> StageBytes:
        """Bytes of a set as a stage, with so many samples of a micro-batch on a device."""
        found = self._held.get((mask, samples))
        if found is None:
            found = self.problem.amounts(mask).held(samples, self.problem.regime.assumed_copies)
            self._held[mask, samples] = found
        return found

    def trainable_bytes(self, mask: int) -> float:
        """Bytes of trainable parameters that a set reads."""
        return self.problem.sums(mask).trainable

    def finish_array_s(self, trainable_bytes: np.ndarray, num_replicas: int) -> np.ndarray:
        """Gradient all-reduce over neighbouring devices and optimizer's step of stages, for all mini-batches."""
        found = self._finish.get(num_replicas)
        if found is None:
            found = self._finish[num_replicas] = FinishLines.of(self._even, tuple(range(num_replicas)))
        return found.seconds(trainable_bytes) * self.problem.regime.minibatches
