"""The devices that share one replica of a stage, as one of their workers sees them."""

from __future__ import annotations

from torch import Tensor

from gpp.mechanisms.tensor_parallel.regions import shard
from gpp.mechanisms.tensor_parallel.shards import Shards
from gpp.runtime.hang_detection.status import AbstractStatus
from gpp.runtime.job import Job
from gpp.runtime.transport.channels import AbstractTransport
from gpp.runtime.worker.hooks import AbstractWorkerPart
from gpp.stage import Stage


class TensorParallelWorkerPart(AbstractWorkerPart):
    """Stages on shards; there is nothing to do beside their passes."""

    def shards(self, job: Job, stage: Stage, device_id: int, transport: AbstractTransport, status: AbstractStatus) -> Shards:
        team = stage.replica_of(device_id)

        def add_up(tensor: Tensor) -> None:
            status.waiting(True)
            transport.sum_members(team, tensor).wait()
            status.waiting(False)

        sharding = shard(job.captured, stage.devices_per_replica)
        return Shards(sharding=sharding, captured=job.captured, number=team.index(device_id), add_up=add_up)


WORKER = TensorParallelWorkerPart()
