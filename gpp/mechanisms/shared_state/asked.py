"""The setting `optimizer.shard=replicas`, and what it changes in a planning problem."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from gpp.cost.problem import Problem
from gpp.cost.regime import AbstractUpdates
from gpp.errors import InvalidConfig
from gpp.mechanisms.shared_state.shares import largest_share
from gpp.runtime.job_asked import AbstractAsked

REPLICAS = "replicas"


@dataclass(frozen=True, slots=True)
class SharedUpdates(AbstractUpdates):
    """Updates of whole parameters, dealt out to the replicas of a stage."""

    def largest(self, sizes: Mapping[str, float], replicas: int) -> float:
        return largest_share(sizes, replicas)


class SharedStateAsked(AbstractAsked):
    """Shared state holds for all replicated stages of a plan, whatever they say."""

    def by(self, optimizer: Mapping[str, Any], settings: Mapping[str, Any]) -> bool:
        return optimizer.get("shard") == REPLICAS

    def posed(self, problem: Problem, settings: Mapping[str, Any]) -> Problem:
        return replace(problem, updates=SharedUpdates())

    def refuse_engine(self, engine: str) -> None:
        rule = f"engine={engine} updates every replica whole"
        raise InvalidConfig("optimizer.shard", REPLICAS, rule, "set optimizer.shard=none, or use engine=distributed")


ASKED = SharedStateAsked()
