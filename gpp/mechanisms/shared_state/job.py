"""Who updates which parameter among replicas that share the state of their stage, and which plans cannot have it."""

from __future__ import annotations

from collections.abc import Mapping

from gpp.graph.op_graph import OpGraph
from gpp.mechanisms.shared_state.asked import check_stages, refuse, share_out
from gpp.program.program import ReduceGroup, reduce_groups
from gpp.runtime.job import AbstractJobPart, Job, restore


def dealt(graph: OpGraph, group: ReduceGroup) -> list[list[str]]:
    """For each device of a gradient group the parameters that it updates. A stage that shares its state has one group."""
    replica_of = share_out({name: graph.param_of[name].num_bytes for name in group.params}, len(group.devices))
    return [[name for name in group.params if replica_of[name] == n] for n in range(len(group.devices))]


class SharedStateJobPart(AbstractJobPart):
    """Jobs whose replicas share the optimizer's state."""

    def check(self, job: Job, *, overwrites: bool) -> None:
        settings, optimizer = job.settings, restore(job.settings.optimizer)
        if settings.weights:
            rule = f"strategy.weights={restore(settings.weights).name} holds versions of all weights on every replica"
            refuse(rule, "strategy/weights=flush")
        if settings.device_kind == "cuda":
            refuse("a worker on a card hands weights out in its updates, which no proof covers yet", "use cluster=local")
        if optimizer.clip_norm is not None and optimizer.clip_scope == "stage":
            refuse("no replica has the norm of its stage's gradients", "optimizer.clip_scope=model")
        check_stages(job.plan, job.graph)

    def owners(self, job: Job) -> Mapping[str, int]:
        groups = reduce_groups(job.plan, job.graph)
        parts = (part for group in groups for part in zip(group.devices, dealt(job.graph, group), strict=True))
        return {name: device for device, names in parts for name in names}


JOB = SharedStateJobPart()
