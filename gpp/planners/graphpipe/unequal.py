"""Devices of unequal speed and memory: partitions for them.

Objective: the predicted iteration time, as everywhere. What the tables of a search cannot know is which device a stage will
get. So partitions come from three views of the cluster, and only real devices judge them:
1. as if all devices were its slowest and smallest: whatever fits then fits anywhere (`StageCosts`; the ordinary search);
2. as if all were average: of the speed that adds up to the cluster's, with the least, the median and the largest memory
   (`average`), along the structure of the graph;
3. as it is, type by type, along lines of operators (`heterogeneous_chain`).

`rebalance` then improves the best plans on their own devices.

Constraints: those of the planner that calls; a stage's slowest replica decides its time, its smallest one what it may hold.

Complexity: 2 is the ordinary search three times over; 3 see `heterogeneous_chain`.

Departures: the paper has no unequal devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import final

import numpy as np

from gpp.cluster import Device
from gpp.cost.models.base import AbstractCostModel, OpTimes
from gpp.cost.problem import Problem
from gpp.graph.op_graph import OpGraph
from gpp.graph.series_parallel import Order
from gpp.planners.common.candidates import Candidate
from gpp.planners.common.incumbent import Incumbent
from gpp.planners.common.local_search import repair
from gpp.planners.common.stage_costs import StageCosts
from gpp.planners.graphpipe.candidate_partitions import candidate_partitions
from gpp.planners.graphpipe.heterogeneous_chain import HeterogeneousChain
from gpp.planners.graphpipe.partition_search import PartitionSearch
from gpp.planners.graphpipe.sp_structure import SPStructure

DEPTH_SCALES = (0.25, 0.5, 0.75, 1.0)
"""Depths of a line that memory is reckoned with, in units of its stages."""

LAYOUTS = 16
"""Layouts of each line that are judged, with their own types of devices and with the placer's."""

REPAIRS = 2
"""Candidate partitions that lack memory and are changed until they fit, for each view."""

PATIENCE = 6
"""Simulations without a better plan after which no further partition of a view is simulated."""


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
    """Harmonic mean of times: that of speeds."""
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


def simulate_unequal(incumbent: Incumbent, orders: Sequence[Order], lines: Sequence[tuple[int, ...]]) -> None:
    """Simulate partitions for average devices along the structure, and for each type of device along lines."""
    assessor = incumbent.assessor
    views = [StageCosts(problem, replication=assessor.costs.replication) for problem in average(assessor.problem)]
    for costs in views:
        for order in orders:
            found = candidate_partitions(PartitionSearch(SPStructure(costs, order)), assessor, incumbent.best_s)
            incumbent.simulate_all(found.fitting, PATIENCE)
            for _, stages, b in found.lacking[:REPAIRS]:
                repair(incumbent, stages, b)
    if not HeterogeneousChain.affordable(assessor.placer):
        return
    for line in lines:
        for scale in DEPTH_SCALES:
            lacking, found = [], []
            for layout in HeterogeneousChain(views[0], assessor.problem, assessor.placer, line, depth_scale=scale).layouts()[
                :LAYOUTS
            ]:
                tried = [assessor.assess(layout.parts, layout.microbatch_size, types=types) for types in (layout.types, None)]
                fitting = [candidate for candidate in tried if isinstance(candidate, Candidate)]
                found += fitting
                lacking += [layout] * (not fitting)
            incumbent.simulate_all(found, PATIENCE)
            for layout in lacking[:REPAIRS]:
                repair(incumbent, layout.parts, layout.microbatch_size)
            if not lacking:
                break
