"""The devices that share one replica of a stage, as one of their workers sees them."""

from __future__ import annotations

from typing import final

import torch

from gpp.mechanisms.tensor_parallel.regions import shard
from gpp.mechanisms.tensor_parallel.shards import Shards
from gpp.runtime.hang_detection.status import AbstractStatus
from gpp.runtime.job import Job
from gpp.runtime.transport.channels import AbstractTransport
from gpp.runtime.worker.hooks import AbstractWorkerPart
from gpp.stage import Stage


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

    def sum(self, tensor: torch.Tensor) -> None:
        """Add up a contiguous tensor over the members, in place."""
        self._status.waiting(True)
        self._transport.sum_members(self._devices, tensor).wait()
        self._status.waiting(False)


class TensorParallelWorkerPart(AbstractWorkerPart):
    """Stages on shards; there is nothing to do beside their passes."""

    def shards(self, job: Job, stage: Stage, device_id: int, transport: AbstractTransport, status: AbstractStatus) -> Shards:
        team = ReplicaTeam(stage, device_id, transport, status)
        return Shards(sharding=shard(job.captured, stage.devices_per_replica), team=team, captured=job.captured)


WORKER = TensorParallelWorkerPart()
