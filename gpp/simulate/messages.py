"""Bytes of the messages between stages."""

from __future__ import annotations

from collections.abc import Mapping

from gpp.graph.op_graph import OpGraph
from gpp.plan.plan import Plan
from gpp.program.added import WHOLE, ActionShare, lowerings
from gpp.program.kinds import BACKWARD, FORWARD, KINDS, Action, Direction

ORDER_BYTES = 1
"""Payload of an order-only edge: one byte, whatever the number of samples."""


def message_rates(plan: Plan, graph: OpGraph) -> dict[tuple[Direction, int, int], tuple[float, float]]:
    """(direction, source stage, destination stage) -> bytes of each sample and bytes of each message beside them."""
    out, tensors = {}, plan.carried(graph)
    for (s, t), (forward, backward, beside) in plan.message_bytes(graph).items():
        fixed = 0.0 if tensors[s, t] else float(ORDER_BYTES)
        out[FORWARD, s, t], out[BACKWARD, t, s] = (forward, fixed + beside), (backward, fixed)
    for part in lowerings(plan):
        out |= part.rates(plan, graph)
    return out


def message_bytes(
    rates: Mapping[tuple[Direction, int, int], tuple[float, float]], action: Action, part: ActionShare = WHOLE
) -> float:
    """Bytes of a message.

    Args:
        rates: the result of `message_rates`.
        part: what the device sends of it.
    """
    per_sample, fixed = rates[KINDS[action.kind].direction, action.stage, action.peer_stage]
    return per_sample * (action.hi - action.lo) * part.of_samples + fixed * part.fixed
