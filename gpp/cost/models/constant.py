"""Times that a table gives, exactly: the graph's FLOPs are seconds, as in profiles (`gpp.formats.profiles`) and closed forms."""

from __future__ import annotations

import numpy as np

from gpp.cluster import Device
from gpp.cost.models.base import AbstractTable, OpTimes
from gpp.graph.op_graph import OpGraph
from gpp.settings import NotNegative, Positive, settings


@settings("cost")
class Constant(AbstractTable):
    """An operator takes `forward_flops` seconds a sample forwards, `backward_flops` backwards, `weight_flops` of them for weights.

    A graph whose FLOPs are written as seconds then has exact, hand-checkable times: one sample is one micro-batch of a profile, and
    n samples take n times as long. A device's `speed_factor` counts; its data sheet does not. Nothing else takes time.

    Args:
        fixed_s: added once for each operator and pass (what makes small micro-batches inefficient).
        flop_s: seconds of a floating-point operation.
    """

    fixed_s: NotNegative = 0.0
    flop_s: Positive = 1.0

    def op_times(self, graph: OpGraph, samples: int, device: Device, degree: int = 1) -> OpTimes:
        many = samples * graph.shares(degree) * self.flop_s
        forward = np.array([op.forward_flops for op in graph.ops]) * many + self.fixed_s
        backward = np.array([op.backward_flops for op in graph.ops]) * many + self.fixed_s
        weight, speed = graph.amounts.weight_flops * many, device.speed_factor
        return OpTimes(forward_s=forward / speed, backward_s=backward / speed, weight_s=weight / speed)
