"""Who updates which parameter among replicas that share the state of their stage, and which plans cannot have it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gpp.errors import InvalidConfig
from gpp.graph.op_graph import OpGraph
from gpp.mechanisms.shared_state.asked import REPLICAS, share_out
from gpp.plan.plan import Plan
from gpp.program.program import ReduceGroup, reduce_groups
from gpp.runtime.job import AbstractJobPart, Job, restore


def _refuse(rule: str, fix: str) -> None:
    raise InvalidConfig("optimizer.shard", REPLICAS, rule, f"set optimizer.shard=none, or {fix}")


def _check_stages(plan: Plan, shared: Sequence[tuple[str, Sequence[int]]]) -> None:
    """Refuse a replicated stage whose update cannot be shared.

    Args:
        shared: weights that several stages read, with these stages.
    """
    for s, stage in enumerate(plan.stages):
        if len(stage.replicas) == 1:
            continue
        if (t := stage.devices_per_replica) > 1:
            _refuse(f"stage {s} splits its operators over {t} devices, whose weights are shares already", stage.unshared)
        if tied := next((name for name, stages in shared if s in stages), None):
            fix = "a plan in which one stage reads it (strategy=data_parallel)"
            _refuse(f"stage {s} shares {tied} with another stage, whose devices need its gradient, too", fix)
        if any(len(plan.stages_of_device[device]) > 1 for device in stage.devices):
            _refuse(
                f"stage {s} is on a device with other stages, which would wait for its replicas", "strategy.planner.colocate=never"
            )


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
            _refuse(rule, "strategy/weights=flush")
        if settings.device_kind == "cuda":
            _refuse("a worker on a card hands weights out in its updates, which no proof covers yet", "use cluster=local")
        if optimizer.clip_norm is not None and optimizer.clip_scope == "stage":
            _refuse("no replica has the norm of its stage's gradients", "optimizer.clip_scope=model")
        _check_stages(job.plan, job.plan.shared_weights(job.graph))

    def owners(self, job: Job) -> Mapping[str, int]:
        groups = reduce_groups(job.plan, job.graph)
        parts = (part for group in groups for part in zip(group.devices, dealt(job.graph, group), strict=True))
        return {name: device for device, names in parts for name in names}


JOB = SharedStateJobPart()
