"""Times that were measured on each type of devices, for micro-batches of one size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np

from gpp.cluster import Device
from gpp.cost.models.base import AbstractTable, OpTimes
from gpp.errors import InvalidConfig
from gpp.graph.op_graph import OpGraph


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TimesByType(AbstractTable):
    """The seconds of each operator's forward by the name of a device's type; nothing is trained.

    A device's `speed_factor` counts, so that variants of a type that are slower have no profile of their own; its data sheet does
    not.

    Args:
        batch: samples of the micro-batches that were timed.
        seconds: type -> node -> seconds; an operator is the sum of the nodes that make it up.
        source: where they come from, for messages.
    """

    batch: int
    seconds: dict[str, dict[str, float]]
    source: str

    def op_times(self, graph: OpGraph, samples: int, device: Device, degree: int = 1) -> OpTimes:
        """As `AbstractCostModel.op_times`.

        Raises:
            InvalidConfig: no device of that type has been timed, or no micro-batch of that size.
        """
        known = self.seconds.get(device.name or "")
        if device.name is None:
            rule = f"the times in {self.source} are found by the types of devices, and this device has none"
            raise InvalidConfig(
                "cluster.device.name", None, rule, f"use cluster=pipeedge, or name one of {', '.join(self.seconds)}"
            )
        if known is None:
            rule = (
                f"is a type of which {self.source} has no times for this model, batch and dtype; it has {', '.join(self.seconds)}"
            )
            raise InvalidConfig("cluster.devices", device.name, rule, "leave its hosts out, or measure it (mode=profile)")
        if samples != self.batch:
            rule = f"has no times in {self.source}, which has those of {self.batch} samples"
            raise InvalidConfig(
                "microbatch_size", samples, rule, f"set microbatch_size={self.batch} and a multiple as minibatch_size"
            )
        forward = np.array([sum(known[node] for node in op.nodes or (op.name,)) for op in graph.ops]) / device.speed_factor
        nothing = np.zeros_like(forward)
        return OpTimes(forward_s=forward, backward_s=nothing, weight_s=nothing)
