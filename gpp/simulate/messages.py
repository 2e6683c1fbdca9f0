"""Bytes of the messages between stages."""

from __future__ import annotations

from gpp.cost.edges import ANNOUNCE_BYTES
from gpp.graph.op_graph import OpGraph
from gpp.plan.plan import Plan
from gpp.program.kinds import BACKWARD, FORWARD, Direction

ORDER_BYTES = 1
"""Payload of an order-only edge: one byte, whatever the number of samples."""


def message_rates(plan: Plan, graph: OpGraph) -> dict[tuple[Direction, int, int], tuple[float, float]]:
    """(direction, source stage, destination stage) -> bytes for each sample, bytes for each message."""
    out = {}
    tensors, announces = plan.edge_tensors(graph), plan.announces(graph)
    for (s, t), (forward, backward) in plan.message_bytes(graph).items():
        fixed = 0.0 if tensors[s, t] else float(ORDER_BYTES)
        ahead = float(ANNOUNCE_BYTES) if (s, t) in announces else 0.0
        out[FORWARD, s, t], out[BACKWARD, t, s] = (forward, fixed + ahead), (backward, fixed)
    return out
