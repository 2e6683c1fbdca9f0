"""Bytes of the messages between stages, and to helpers."""

from __future__ import annotations

from gpp.graph.op_graph import OpGraph
from gpp.plan.plan import Plan
from gpp.program.kinds import BACKWARD, FORWARD, HELPING, Direction

ORDER_BYTES = 1
"""Payload of an order-only edge: one byte, whatever the number of samples."""


def message_rates(plan: Plan, graph: OpGraph) -> dict[tuple[Direction, int, int], tuple[float, float]]:
    """(direction, source stage, destination stage) -> bytes for each sample, bytes for each message."""
    out = {}
    for (s, t), tensors in plan.edge_tensors(graph).items():
        fixed = 0.0 if tensors else float(ORDER_BYTES)
        out[FORWARD, s, t] = (sum(x.bytes_per_sample for x in tensors), fixed)
        out[BACKWARD, t, s] = (sum(x.bytes_per_sample for x in tensors if x.differentiable), fixed)
    for s, stage in enumerate(plan.stages):
        if stage.weight_device is not None:
            out[HELPING, s, s] = (sum(graph.ops[op].late_bytes for op in stage.ops), 0.0)
    return out
