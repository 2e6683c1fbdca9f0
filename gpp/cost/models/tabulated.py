"""Times that a profile gives, exactly: the graph's FLOPs are seconds (`gpp.formats.profiles`)."""

from __future__ import annotations

from typing import final

import numpy as np

from gpp.cluster import Device
from gpp.cost.models.base import AbstractTable, OpTimes
from gpp.graph.op_graph import OpGraph
from gpp.settings import NotNegative, settings


@final
@settings("cost")
class Tabulated(AbstractTable):
    """One sample is one micro-batch of the profile; n samples take n times as long, whatever the device.

    A device's `speed_factor` counts; its data sheet does not. Profiles time no optimizer.

    Args:
        update_s_per_byte: seconds of the optimizer's step for each byte of trainable parameter.
    """

    update_s_per_byte: NotNegative = 0.0

    def op_times(self, graph: OpGraph, samples: int, device: Device, degree: int = 1) -> OpTimes:
        many = samples * graph.shares(degree)
        forward = np.array([op.forward_flops for op in graph.ops]) * many / device.speed_factor
        backward = np.array([op.backward_flops for op in graph.ops]) * many / device.speed_factor
        weight = graph.amounts.weight_flops * many / device.speed_factor
        return OpTimes(forward_s=forward, backward_s=backward, weight_s=weight)

    def update_s(self, num_bytes: float, device: Device) -> float:
        return self.update_s_per_byte * num_bytes / device.speed_factor
