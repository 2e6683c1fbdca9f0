"""Bytes of the messages between stages, and to helpers."""

from __future__ import annotations

from collections.abc import Mapping

from gpp.cost.edges import ANNOUNCE_BYTES
from gpp.graph.op_graph import OpGraph
from gpp.plan.edges import announcing
from gpp.plan.helpers import gradient_bytes
from gpp.plan.plan import Plan
from gpp.program.action import Action
from gpp.program.added import lowerings
from gpp.program.kinds import BACKWARD, FORWARD, HELPING, HELPING_INPUTS, KINDS, Direction
from gpp.stage import Stage

ORDER_BYTES = 1
"""Payload of an order-only edge: one byte, whatever the number of samples."""


def message_rates(plan: Plan, graph: OpGraph) -> dict[tuple[Direction, int, int], tuple[float, float]]:
    """(direction, source stage, destination stage) -> bytes for each sample, bytes for each message."""
    out = {}
    tensors, announces = plan.edge_tensors(graph), announcing(plan, graph)
    for (s, t), (forward, backward) in plan.message_bytes(graph).items():
        fixed = 0.0 if tensors[s, t] else float(ORDER_BYTES)
        ahead = float(ANNOUNCE_BYTES) if (s, t) in announces else 0.0
        out[FORWARD, s, t], out[BACKWARD, t, s] = (forward, fixed + ahead), (backward, fixed)
    for s, stage in enumerate(plan.stages):
        trained = sum(graph.param_of[name].num_bytes for name in {name for op in stage.ops for name in graph.trained_by[op]})
        out[HELPING, s, s] = (sum(graph.ops[op].late_bytes for op in stage.ops), 0.0)
        out[HELPING_INPUTS, s, s] = (gradient_bytes(stage, graph)[1], trained)
    for part in lowerings(plan):
        out |= part.rates(plan, graph)
    return out


def message_bytes(
    plan: Plan, rates: Mapping[tuple[Direction, int, int], tuple[float, float]], action: Action, device: int
) -> float:
    """Bytes of a message that a device sends; where several make the gradients of a stage's inputs, each sends its columns.

    Args:
        rates: of `message_rates`.
    """
    way, stage = KINDS[action.kind].direction, plan.stages[action.stage]
    per_sample, fixed = rates[way, action.stage, action.peer_stage]
    count = action.hi - action.lo
    if way == HELPING_INPUTS:
        return per_sample * count + fixed * dict(stage.input_share)[action.peer_device]
    return (per_sample * count + fixed) * (part_of(stage, device) if way == BACKWARD else 1.0)


def part_of(stage: Stage, device: int) -> float:
    """A device's part of the gradients of a stage's inputs."""
    return stage.own_input_share if device in stage.devices else dict(stage.input_share).get(device, 0.0)
