"""A cluster of unequal devices as one of equal, average ones: a view for searches whose tables know no devices."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import final

import numpy as np

from gpp.cluster import Device
from gpp.cost.models.base import AbstractCostModel, OpTimes
from gpp.cost.problem import Problem
from gpp.graph.op_graph import OpGraph


@final
@dataclass(frozen=True, slots=True)
class _Average(AbstractCostModel):
    """Times of an average device: the harmonic mean over the cluster's, so that equal devices would get as much done."""

    problem: Problem

    def op_times(self, graph: OpGraph, samples: int, device: Device, degree: int = 1) -> OpTimes:
        firsts = self.problem.type_of_device
        each = [self.problem.op_times(samples, first, degree) for first in firsts]

        def mean(rows: list[np.ndarray]) -> np.ndarray:
            with np.errstate(divide="ignore"):
                return len(rows) / (1 / np.array(rows)).sum(axis=0)

        return OpTimes(
            forward_s=mean([t.forward_s for t in each]),
            backward_s=mean([t.backward_s for t in each]),
            weight_s=mean([t.weight_s for t in each]),
        )

    def update_s(self, num_bytes: float, device: Device) -> float:
        return _mean([self.problem.cost.update_s(num_bytes, d) for d in self.problem.cluster.devices])

    def move_s(self, num_bytes: float, device: Device) -> float:
        return _mean([self.problem.cost.move_s(num_bytes, d) for d in self.problem.cluster.devices])

    def launch_s(self, device: Device) -> float:
        return _mean([self.problem.cost.launch_s(d) for d in self.problem.cluster.devices])


def _mean(each: list[float]) -> float:
    """The harmonic mean of times, which is the time at the mean speed."""
    return len(each) / sum(1 / s for s in each) if all(each) else 0.0


def average(problem: Problem) -> list[Problem]:
    """The problem on equal, average devices and links, with the least, the median and the largest memory."""
    cluster = problem.cluster.evened()
    memory = sorted(device.memory_bytes for device in cluster.devices)
    out = []
    for level in sorted({memory[0], memory[len(memory) // 2], memory[-1]}):
        devices = (replace(cluster.devices[0], memory_bytes=level),) * len(memory)
        out.append(replace(problem, cluster=replace(cluster, devices=devices), cost=_Average(problem)))
    return out
