"""Seconds of the copies of activations to the host and back.

A copy takes `Device.host_copy_s` of its bytes: its latency, then its bytes at the link's bandwidth over those who share it.
Messages of a link that runs over the host's (`Link.over_host`) go first, so their own times stay as they are, and the copies of the
same direction are charged with their bytes: each with an equal part of what its device sends, or receives, in a mini-batch. A link
is full duplex: what goes out does not slow down what comes in.

Source: vPipe gives activations between hosts priority over swapped ones on the link that they share (IEEE TPDS 33(3), 2022).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from gpp.cluster import Cluster
from gpp.cost.stage import StageCost
from gpp.graph.op_graph import OpGraph
from gpp.mechanisms.marks.stage import marks_of
from gpp.plan.plan import Plan
from gpp.program.added import CopyCost, CopyCosts
from gpp.program.kinds import KINDS, Resource
from gpp.program.lower import communication
from gpp.simulate.messages import message_rates


def copy_costs(plan: Plan, graph: OpGraph, cluster: Cluster, bills: Sequence[StageCost]) -> CopyCosts:
    """The cost of the copies of each stage. Stages that keep all on their devices are left out.

    Raises:
        InvalidConfig: a device has no link to its host.
    """
    copying = [s for s, stage in enumerate(plan.stages) if marks_of(stage).offload]
    if not copying:
        return {}
    beside = _beside(plan, graph, cluster, copying)
    out: dict[tuple[Resource, int], CopyCost] = {}
    for s in copying:
        for way in (Resource.COPY_OUT, Resource.COPY_IN):
            seconds = [
                max(cluster.devices[d].host_copy_s(moved + beside.get((way, d), 0.0)) for d in plan.stages[s].devices)
                for moved in (bills[s].moved_bytes, bills[s].last_moved_bytes)
            ]
            out[way, s] = CopyCost(seconds[0], bills[s].moved_bytes, seconds[1], bills[s].last_moved_bytes)
    return out


def _beside(plan: Plan, graph: OpGraph, cluster: Cluster, copying: Sequence[int]) -> Mapping[tuple[Resource, int], float]:
    """(Channel, device) -> bytes of messages over the same link and in the same direction, for each of its copies."""
    if not any(link.over_host for link in cluster.wiring.every):
        return {}
    rates = message_rates(plan, graph)
    moved: dict[tuple[Resource, int], float] = defaultdict(float)
    _, sends = communication(plan, graph, plan.minibatch_size)
    for (device, _), messages in sends.items():
        for kind, stage, _, peer_stage, peer, lo, hi in messages:
            if peer != device and cluster.link(device, peer).over_host:
                per_sample, fixed = rates[KINDS[kind].direction, stage, peer_stage]
                moved[Resource.COPY_OUT, device] += per_sample * (hi - lo) + fixed
                moved[Resource.COPY_IN, peer] += per_sample * (hi - lo) + fixed
    copies: dict[int, int] = defaultdict(int)
    for s in copying:
        stage = plan.stages[s]
        for device in stage.devices:
            copies[device] += -(-plan.minibatch_size // stage.microbatch_size) // stage.stride
    return {(way, device): total / copies[device] for (way, device), total in moved.items() if copies.get(device)}
