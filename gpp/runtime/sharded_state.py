"""An optimizer's state that a stage's replicas share (`optimizer.shard=replicas`): whose it is, and which plans cannot have it."""

from __future__ import annotations

from collections.abc import Sequence

from gpp.cost.shares import share_out
from gpp.errors import InvalidConfig
from gpp.graph.op_graph import OpGraph
from gpp.optimizers import AbstractOptimizer
from gpp.plan.plan import Plan
from gpp.program.program import ReduceGroup
from gpp.weights.base import AbstractWeights

REPLICAS = "replicas"


def check_shares(optimizer: AbstractOptimizer, plan: Plan, graph: OpGraph, weights: AbstractWeights, *, cards: bool) -> None:
    """Refuse to share the state of a plan that cannot.

    Args:
        cards: whether it runs on cards.

    Raises:
        InvalidConfig: names the stage, the parameter or the other setting.
    """
    if optimizer.shard != REPLICAS:
        return

    def refuse(rule: str, fix: str) -> None:
        raise InvalidConfig("optimizer.shard", optimizer.shard, rule, f"set optimizer.shard=none, or {fix}")

    if not weights.flushes:
        refuse(f"strategy.weights={weights.name} holds versions of all weights on every replica", "strategy/weights=flush")
    if cards:
        refuse("a worker on a card hands weights out in its updates, which no proof covers yet", "use cluster=local")
    if optimizer.clip_norm is not None and optimizer.clip_scope == "stage":
        refuse("no replica has the norm of its stage's gradients", "optimizer.clip_scope=model")
    shared = plan.shared_weights(graph)
    for s, stage in enumerate(plan.stages):
        if len(stage.replicas) == 1:
            continue
        if (t := stage.devices_per_replica) > 1:
            refuse(f"stage {s} splits its operators over {t} devices, whose weights are shares already", stage.unshared)
        if tied := next((name for name, stages in shared if s in stages), None):
            fix = "a plan in which one stage reads it (strategy=data_parallel)"
            refuse(f"stage {s} shares {tied} with another stage, whose devices need its gradient, too", fix)
        if any(len(plan.stages_of_device[device]) > 1 for device in stage.devices):
            refuse(
                f"stage {s} is on a device with other stages, which would wait for its replicas", "strategy.planner.colocate=never"
            )


class Shares:
    """Which device applies which parameter, among the replicas that share the state of their stage.

    Args:
        groups: of `gpp.program.program.reduce_groups`. A stage whose replicas share their state has one for itself.
    """

    def __init__(self, optimizer: AbstractOptimizer, graph: OpGraph, groups: Sequence[ReduceGroup]) -> None:
        self._parts: dict[int, list[list[str]]] = {}
        self._owner: dict[str, int] = {}
        for g, group in enumerate(groups if optimizer.shard == REPLICAS else ()):
            dealt = share_out({name: graph.param_of[name].num_bytes for name in group.params}, len(group.devices))
            self._parts[g] = [[name for name in group.params if dealt[name] == n] for n in range(len(group.devices))]
            self._owner |= {name: group.devices[replica] for name, replica in dealt.items()}

    def applies(self, device: int, name: str) -> bool:
        """Whether a device that holds a parameter applies its gradient, and keeps its state."""
        return self._owner.get(name, device) == device

    def owned(self, device: int, names: frozenset[str]) -> frozenset[str]:
        """The names that a device saves, of which it would save `names` if nothing were shared."""
        return frozenset(name for name in names if name not in self._owner) | {n for n, d in self._owner.items() if d == device}

    def parts(self, group: int) -> list[list[str]] | None:
        """For each device of a gradient group the parameters that it applies; None where all apply all."""
        return self._parts.get(group)
