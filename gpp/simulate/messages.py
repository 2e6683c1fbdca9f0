"""Bytes of the messages between stages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from gpp.graph.op_graph import OpGraph
from gpp.plan.plan import Plan
from gpp.program.added import WHOLE, ActionShare, lowerings
from gpp.program.kinds import BACKWARD, FORWARD, KINDS, Action, Direction
from gpp.routing import copies, messages

ORDER_BYTES = 1
"""Payload of an order-only edge: one byte, whatever the number of samples."""


DevicePass = tuple[int, int, int]
"""Stage, device and micro-batch."""


def device_messages(plan: Plan, graph: OpGraph, num_samples: int) -> Iterator[tuple[Direction, DevicePass, DevicePass, int]]:
    """The messages of all edges: direction, the pass that makes each, the pass that reads it, and its samples."""
    cut = [stage.pieces(num_samples) for stage in plan.stages]
    group_of = [{replica[0]: replica for replica in stage.replicas} for stage in plan.stages]
    returning, forward, backward = plan.returning(graph), FORWARD, BACKWARD
    for s, t in plan.carried(graph):
        back = (s, t) in returning
        for makes, made, reads, read, lo, hi in messages(cut[s], cut[t]):
            makers, readers = group_of[s][makes], group_of[t][reads]
            for a, b in copies(makers, readers):
                yield forward, (s, a, made), (t, b, read), hi - lo
            for b, a in copies(readers, makers) if back else ():
                yield backward, (t, b, read), (s, a, made), hi - lo


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
