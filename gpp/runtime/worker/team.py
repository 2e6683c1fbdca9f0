"""The devices that share one replica of a stage (tensor parallelism), as one of their workers sees them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TypeVar, final

import torch

from gpp.capture.sharded import Shards
from gpp.capture.stage import StageModule
from gpp.graph.sharding.regions import Sharding, shard
from gpp.runtime.checkpoint.final import save_final
from gpp.runtime.checkpoint.split import SplitWeights
from gpp.runtime.hang_detection.status import AbstractStatus
from gpp.runtime.job import Job
from gpp.runtime.transport.channels import AbstractTransport
from gpp.stage import Stage

T = TypeVar("T")


@final
class ReplicaTeam:
    """One device among those of its replica; it adds up tensors with the others.

    Args:
        device_id: one of the stage's devices.
        status: is told when the device waits for the others.
    """

    def __init__(self, stage: Stage, device_id: int, transport: AbstractTransport, status: AbstractStatus) -> None:
        self._transport, self._status = transport, status
        self._devices = stage.replica_of(device_id)
        self.member = self._devices.index(device_id)
        self.saves = self._devices == stage.replicas[0]
        """Whether the replica's weights are those that are saved."""

    def sum(self, tensor: torch.Tensor) -> None:
        """Add up a contiguous tensor over the members, in place."""
        self._status.waiting(True)
        self._transport.sum_members(self._devices, tensor).wait()
        self._status.waiting(False)


@final
class Teams:
    """A worker's teams, one for each of its stages whose replicas are several devices.

    `shards` has the worker's part of each of these stages, and `split` says which of all its weights are shares.
    """

    def __init__(
        self, job: Job, stages: Collection[int], device_id: int, transport: AbstractTransport, status: AbstractStatus
    ) -> None:
        found: dict[int, Sharding] = {}
        saves = job.settings.final_weights
        self._saved = tuple(s for s in stages if saves and device_id in job.plan.stages[s].replicas[0])
        self._teams: dict[int, ReplicaTeam] = {}
        self.shards: dict[int, Shards] = {}
        self.split = SplitWeights({})
        for s in stages:
            stage = job.plan.stages[s]
            degree = stage.tensor_parallel
            if degree > 1:
                found.setdefault(degree, shard(job.captured, degree))
                team = self._teams[s] = ReplicaTeam(stage, device_id, transport, status)
                self.shards[s] = Shards(sharding=found[degree], team=team, captured=job.captured)

    def _leads(self, stage: int) -> bool:
        """Whether this worker reports for its replica what all members have."""
        return stage not in self._teams or not self._teams[stage].member

    def led(self, of_stage: Mapping[int, T]) -> list[T]:
        """The values of those stages whose replica this worker leads."""
        return [value for s, value in of_stage.items() if self._leads(s)]

    def save(self, run_dir: Path, modules: Mapping[int, StageModule]) -> None:
        """Write the final weights of the worker's stages, whole, if its replica is the one that does, and the job asks for them."""
        for s in self._saved:
            state = {name: self.split.whole(name, tensor) for name, tensor in modules[s].state_dict().items()}
            if self._leads(s):
                save_final(run_dir, s, state)

    def join(self, modules: Mapping[int, StageModule]) -> None:
        """Find out which weights of the stages' modules are shares. The modules must be there."""
        self.split = SplitWeights(
            {
                name: (self.shards[s], team.saves)
                for s, team in self._teams.items()
                for name, _ in (*modules[s].named_parameters(), *modules[s].named_buffers())
            }
        )
