"""A cost model for tests and closed forms: every operator takes the time that a table gives it."""

from __future__ import annotations

import numpy as np

from gpp.cluster import Device
from gpp.cost.models.base import AbstractCostModel, OpTimes
from gpp.graph.op_graph import OpGraph
from gpp.settings import NotNegative, settings


@settings("cost")
class Constant(AbstractCostModel):
    """An operator takes `forward_flops` seconds a sample forwards, `backward_flops` backwards.

    A graph whose FLOPs are written as seconds then has exact, hand-checkable times;
    `fixed_s` is added once for each operator and pass (what makes small micro-batches inefficient).
    """

    fixed_s: NotNegative = 0.0

    def op_times(self, graph: OpGraph, samples: int, device: Device, degree: int = 1) -> OpTimes:
        many = samples * graph.shares(degree)
        forward = np.array([op.forward_flops for op in graph.ops]) * many + self.fixed_s
        backward = np.array([op.backward_flops for op in graph.ops]) * many + self.fixed_s
        return OpTimes(forward_s=forward / device.speed_factor, backward_s=backward / device.speed_factor)

    def update_s(self, num_bytes: float, device: Device) -> float:
        return 0.0

    def move_s(self, num_bytes: float, device: Device) -> float:
        return 0.0

    def launch_s(self, device: Device) -> float:
        return 0.0
