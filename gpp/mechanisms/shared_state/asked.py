"""The setting `optimizer.shard=replicas`, and what it changes in a planning problem.

Where a stage's replicas share the optimizer's state (ZeRO's first stage), `share_out` chooses the replica that keeps each
parameter's. Whole parameters are dealt out, the largest first, each to the replica that has least so far; torch's
`ZeroRedundancyOptimizer` deals them out alike. So a norm, an update and a checkpoint see the very tensors that they see
without sharing, and a parameter that is larger than all others together is the share of one replica.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from gpp.cost.problem import Problem
from gpp.cost.regime import AbstractUpdates
from gpp.errors import InvalidConfig
from gpp.graph.op_graph import OpGraph
from gpp.plan.plan import Plan
from gpp.runtime.job_asked import AbstractAsked


def share_out(sizes: Mapping[str, float], count: int) -> dict[str, int]:
    """Name of a parameter -> number of its replica, in 0..count-1.

    Args:
        sizes: name -> bytes.
    """
    held, out = [0.0] * count, dict[str, int]()
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        out[name] = replica = min(range(count), key=held.__getitem__)
        held[replica] += sizes[name]
    return out


REPLICAS = "replicas"


def refuse(rule: str, fix: str) -> None:
    """Refuse to share; raises InvalidConfig."""
    raise InvalidConfig("optimizer.shard", REPLICAS, rule, f"set optimizer.shard=none, or {fix}")


def check_stages(plan: Plan, graph: OpGraph) -> None:
    """Refuse a replicated stage whose update cannot be shared.

    Raises:
        InvalidConfig: names the stage.
    """
    if all(len(stage.replicas) == 1 for stage in plan.stages):
        return
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


@dataclass(frozen=True, slots=True)
class SharedUpdates(AbstractUpdates):
    """Updates of whole parameters, dealt out to the replicas of a stage."""

    def largest(self, sizes: Mapping[str, float], replicas: int) -> float:
        """1 / replicas where the parameters can be dealt out evenly."""
        total, held = sum(sizes.values()), [0.0] * replicas
        for name, replica in share_out(sizes, replicas).items():
            held[replica] += sizes[name]
        return max(held) / total if total else 1.0


class SharedStateAsked(AbstractAsked):
    """Shared state holds for all replicated stages of a plan, whatever they say."""

    def by(self, optimizer: Mapping[str, Any], settings: Mapping[str, Any]) -> bool:
        return optimizer.get("shard") == REPLICAS

    def posed(self, problem: Problem, settings: Mapping[str, Any]) -> Problem:
        """The problem whose stages update in parts, and whose planner is told which plans cannot."""
        engine, graph = problem.refuses, problem.graph

        def why_not(plan: Plan) -> str | None:
            try:
                check_stages(plan, graph)
            except InvalidConfig as error:
                return str(error)
            return engine(plan)

        return replace(problem, updates=SharedUpdates(), refuses=why_not)

    def refuse_engine(self, engine: str) -> None:
        rule = f"engine={engine} updates every replica whole"
        raise InvalidConfig("optimizer.shard", REPLICAS, rule, "set optimizer.shard=none, or use engine=distributed")


ASKED = SharedStateAsked()
