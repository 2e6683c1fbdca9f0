"""Several stages on each device, from a plan that has each stage on a device of its own.

With h the distance of a stage to the sink and D the depth of the plan, a V wants stages s and t on one device where h(s) + h(t) is
D + 1: then what a device holds for the one grows as what it holds for the other shrinks. Interleaving with k stages a device
wants h to fall by D / k from each to the next. On a chain both give the published placements; elsewhere the cheapest matching
of |h(s) + h(t) - D - 1|, or of |h(s) - h(t) - D / k|.

Neither needs a search. The costs are convex in a sum and in a difference. So for the V the stage with the least h goes with the one
with the most, and so on; and of k classes of stages by h, equally many in each, the stages go together by their rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gpp.cluster import Cluster
from gpp.errors import Infeasible, InvalidPlan
from gpp.plan.plan import Plan

V = 2
"""Stages of a device under a V schedule."""


def unfolded(cluster: Cluster, k: int, *, back: bool) -> Cluster:
    """A cluster in which each device is there k times, for a planner that gives each a stage.

    Args:
        back: every other time in reverse, as a V places neighbours.
    """
    turns = [range(cluster.num_devices)[:: -1 if back and turn % 2 else 1] for turn in range(k)]
    which = [device for turn in turns for device in turn]
    return replace(
        cluster,
        devices=tuple(cluster.devices[d] for d in which),
        nodes=tuple(cluster.nodes[d] for d in which),
        processors=None,
        hosts=(),
    )


def v_pairs(distance: Sequence[int], seconds: Sequence[float]) -> list[tuple[int, ...]]:
    """The stages of each device under a V; slow ones with fast ones, where distances leave a choice."""
    order = sorted(range(len(distance)), key=lambda s: (distance[s], seconds[s], s))
    half = len(order) // V
    return [(far, near) for near, far in zip(order[:half], reversed(order[half:]), strict=True)]


def interleaved_groups(distance: Sequence[int], seconds: Sequence[float], k: int) -> list[tuple[int, ...]]:
    """The stages of each device under interleaving, those far from the sink first."""
    order = sorted(range(len(distance)), key=lambda s: (-distance[s], s))
    size = len(order) // k
    classes = [order[c * size : (c + 1) * size] for c in range(k)]
    for c, own in enumerate(classes):
        own.sort(key=lambda s: (-distance[s], seconds[s] * (-1) ** c, s))
    return list(zip(*classes, strict=True))


def folded(plan: Plan, seconds: Sequence[float], k: int, num_devices: int, *, back: bool) -> Plan:
    """The plan with k stages on each device.

    Args:
        seconds: seconds of a micro-batch at each stage.
        num_devices: there are no more.
        back: whether as a V, else interleaved.

    Raises:
        Infeasible: a stage has several devices, or the stages are no multiple of k, or too many.
    """
    count = len(plan.stages)
    for s, stage in enumerate(plan.stages):
        if len(stage.devices) > 1:
            raise Infeasible(
                f"stage {s} has {len(stage.devices)} devices, and under a schedule with {k} stages a device each has one",
                "a planner without replicas (strategy.planner.replication=false)",
            )
    if count % k:
        raise Infeasible(
            f"{count} stages are no multiple of the {k} that each device runs",
            "another number of devices, or strategy/schedule=1f1b",
        )
    if count > k * num_devices:
        raise Infeasible(f"{count} stages are more than {k} on each of {num_devices} devices", "fewer stages, or more devices")
    distance = plan.distance_to_sink
    groups = v_pairs(distance, seconds) if back else interleaved_groups(distance, seconds, k)
    device_of = {s: device for device, group in enumerate(sorted(groups, key=min)) for s in group}
    stages = tuple(replace(stage, devices=(device_of[s],)) for s, stage in enumerate(plan.stages))
    return replace(plan, stages=stages)


def check_folded(plan: Plan, k: int) -> None:
    """Refuse a plan whose devices do not run k stages each, as one from a file may be.

    Raises:
        InvalidPlan: names a device.
    """
    for device, stages in plan.stages_of_device.items():
        if len(stages) != k or any(len(plan.stages[s].devices) > 1 for s in stages):
            raise InvalidPlan(
                f"device {device} runs stages {list(stages)}, and the schedule needs {k} on each device, of one device each. "
                "Fix: plan with this schedule, or use strategy/schedule=1f1b"
            )
