"""Roofline: an operator takes as long as its arithmetic or its memory traffic, plus a fixed cost for each kernel."""

from __future__ import annotations

from typing import Literal, final

import numpy as np

from gpp.cluster import Device
from gpp.cost.models.base import AbstractCostModel, OpTimes
from gpp.graph.op_graph import OpGraph
from gpp.settings import NotNegative, settings


@final
@settings("cost")
class Analytical(AbstractCostModel):
    """Times from the graph's amounts and the device's data sheet, with no measurement.

        forward  = max(FLOPs / sustained FLOP/s, (traffic x samples + parameters) / bandwidth) + kernels x latency
        backward = the same with the backward pass's FLOPs, traffic and kernels

    Parameters are read once for each micro-batch, however small, and a kernel has a fixed cost: the two reasons
    why small micro-batches are inefficient. Of an embedding table (`Param.gathered`) the forward pass reads the rows it
    needs, but the backward pass writes a gradient as large as the table. Where a backward leaves the gradients of the weights
    for later, they take their own FLOPs, or the time to read what is held for them and to write them, and as large a share of
    the kernels as of the FLOPs. An operator that trains nothing, keeps nothing and has no
    backward FLOPs (a view, a sum) costs nothing backwards.

    Source: Williams et al., "Roofline", 2009; the per-kernel term as in GraphPipe's profiled costs, which a
    micro-batch too small for the device shows as a floor.

    Args:
        backward_traffic: bytes moved backwards for each byte forwards. 2: the gradient of the output is read
            beside the saved input, and the gradients of the input and of the weights are written.
        backward_kernels: kernels launched backwards for each one forwards: one for the input's and one for the
            weights' gradient.
        gathered_traffic: bytes moved backwards for each byte of a trained embedding table. 4, as torch's dense gradients do:
            filled with zeros, then read, and the sum so far read and written; 0 for sparse gradients.
        update_traffic: bytes that the optimizer moves for each byte of trainable parameter. 7 for Adam (reads
            weight, gradient and two moments, writes weight and moments); SGD moves 3, SGD with momentum 5.
        narrow: floating-point type of products, where it is narrower than that of the weights; None: the graph's own.
            Weights are read and gradients written in the graph's type, so small micro-batches may be faster than predicted.
    """

    backward_traffic: NotNegative = 2.0
    backward_kernels: NotNegative = 2.0
    gathered_traffic: NotNegative = 4.0
    update_traffic: NotNegative = 7.0
    narrow: Literal["bfloat16", "float16"] | None = None

    def op_times(self, graph: OpGraph, samples: int, device: Device, degree: int = 1) -> OpTimes:
        amounts, shares = graph.amounts, graph.shares(degree)
        flop_per_s = device.flop_per_s(self.product_type(graph))
        bytes_per_s = device.memory_bandwidth_bytes_per_s * device.speed_factor
        latency_s = device.kernel_latency_s / device.speed_factor
        moved = amounts.traffic_bytes * samples + amounts.param_bytes - amounts.gathered_bytes
        forward = np.maximum(amounts.forward_flops * samples / flop_per_s, moved / bytes_per_s)
        # A shard's kernels are smaller, and as many.
        forward = forward * shares + amounts.num_kernels * latency_s
        returned = self.backward_traffic * moved + self.gathered_traffic * amounts.gathered_bytes * amounts.trains
        backward = np.maximum(amounts.backward_flops * samples / flop_per_s, returned / bytes_per_s)
        backward = backward * shares + self.backward_kernels * amounts.num_kernels * latency_s
        differentiated = (amounts.backward_flops > 0) | (amounts.saved_bytes > 0) | amounts.trains
        backward = np.where(differentiated, backward, 0.0)
        # Whoever makes them later reads what was held for it, and writes the gradients; it launches its share of the kernels.
        written = amounts.param_bytes - amounts.gathered_bytes + self.gathered_traffic * amounts.gathered_bytes
        weight = np.maximum(amounts.weight_flops * samples / flop_per_s, (amounts.late_bytes * samples + written) / bytes_per_s)
        weight = weight * shares + self.backward_kernels * amounts.num_kernels * latency_s * graph.weight_share
        weight = np.where(amounts.weight_flops > 0, np.minimum(weight, backward), 0.0)
        return OpTimes(forward_s=forward, backward_s=backward, weight_s=weight)

    def product_type(self, graph: OpGraph) -> str:
        return self.narrow or graph.dtype

    def update_s(self, num_bytes: float, device: Device) -> float:
        """Seconds of the optimizer step: `update_traffic` x bytes / bandwidth; its arithmetic is negligible beside them."""
        return self.move_s(self.update_traffic * num_bytes, device)

    def move_s(self, num_bytes: float, device: Device) -> float:
        return num_bytes / (device.memory_bandwidth_bytes_per_s * device.speed_factor)
