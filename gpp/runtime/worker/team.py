"""The devices that share one replica of a stage (tensor parallelism), as one of their workers sees them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import final

import torch

from gpp.capture.sharded import Shards
from gpp.graph.captured import Captured
from gpp.graph.sharding.regions import Sharding, shard
from gpp.plan.plan import Plan
from gpp.plan.stage import Stage
from gpp.runtime.transport.channels import AbstractTransport


@final
class ReplicaTeam:
    """One device among those of its replica; it adds up tensors with the others.

    Args:
        stage: of the plan.
        device_id: one of its devices.
    """

    def __init__(self, stage: Stage, device_id: int, transport: AbstractTransport) -> None:
        self._transport = transport
        self.devices = stage.replica_of(device_id)
        self.member = self.devices.index(device_id)
        self.leads = not self.member
        self.saves = self.devices == stage.replicas[0]

    def sum(self, tensor: torch.Tensor) -> None:
        """Add up a contiguous tensor over the members, in place."""
        self._transport.sum_members(self.devices, tensor)


class Shardings:
    """How a captured model is split, by degree; found once."""

    def __init__(self, captured: Captured) -> None:
        self._captured = captured
        self._found: dict[int, Sharding] = {}

    def of(self, stage: Stage, team: ReplicaTeam) -> Shards | None:
        """A device's part of a stage; None where replicas are single devices."""
        degree = stage.tensor_parallel
        if degree == 1:
            return None
        if degree not in self._found:
            self._found[degree] = shard(self._captured, degree)
        return Shards(sharding=self._found[degree], team=team, captured=self._captured)


class Whole:
    """Puts a worker's split parameters, and what lies like them, together, and cuts whole ones.

    Args:
        parts: stage -> the device's part of it, for stages whose replicas are several devices.
        teams: stage -> its team.
    """

    def __init__(self, parts: Mapping[int, Shards], teams: Mapping[int, ReplicaTeam]) -> None:
        self._parts = {name: (part, teams[s]) for s, part in parts.items() for name in part.params}

    def split(self, name: str) -> bool:
        """Whether this worker holds a share of a parameter."""
        return name in self._parts
