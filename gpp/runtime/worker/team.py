"""The stages of a worker whose replicas are several devices: what of them it holds, and what it reports and saves for all."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TypeVar, final

from gpp.capture.shards import AbstractShards
from gpp.capture.stage import StageModule
from gpp.mechanism import parts
from gpp.runtime.checkpoint.final import save_final
from gpp.runtime.checkpoint.state import SplitWeights
from gpp.runtime.hang_detection.status import AbstractStatus
from gpp.runtime.job import Job
from gpp.runtime.transport.channels import AbstractTransport
from gpp.runtime.worker.hooks import AbstractWorkerPart

T = TypeVar("T")


@final
class Teams:
    """A worker's teams, one for each of its stages whose replicas are several devices.

    `shards` has the worker's part of each of these stages, and `split` says which of all its weights are shares.
    """

    def __init__(
        self, job: Job, stages: Collection[int], device_id: int, transport: AbstractTransport, status: AbstractStatus
    ) -> None:
        self._saves = job.settings.final_weights
        self._first = tuple(s for s in stages if device_id in job.plan.stages[s].replicas[0])
        """The stages whose first replica, whose weights are those that are saved, the worker is of."""
        self.shards: dict[int, AbstractShards] = {}
        for s in stages:
            stage = job.plan.stages[s]
            names = [value.name for value in stage.mechanisms if value.devices_per_replica > 1]
            for part in parts(names, "worker", "WORKER", AbstractWorkerPart):
                if (shards := part.shards(job, stage, device_id, transport, status)) is not None:
                    self.shards[s] = shards
        self.split = SplitWeights({})

    def _leads(self, stage: int) -> bool:
        """Whether this worker reports for its replica what all members have."""
        return stage not in self.shards or not self.shards[stage].member

    def led(self, of_stage: Mapping[int, T]) -> list[T]:
        """The values of those stages whose replica this worker leads."""
        return [value for s, value in of_stage.items() if self._leads(s)]

    def save(self, run_dir: Path, modules: Mapping[int, StageModule]) -> None:
        """Write the final weights of the worker's stages, whole, if its replica is the one that does, and the job asks for them."""
        for s in self._first if self._saves else ():
            state = {name: self.split.whole(name, tensor) for name, tensor in modules[s].state_dict().items()}
            if self._leads(s):
                save_final(run_dir, s, state)

    def join(self, modules: Mapping[int, StageModule]) -> None:
        """Find out which weights of the stages' modules are shares. The modules must be there."""
        self.split = SplitWeights(
            {
                name: (shards, s in self._first)
                for s, shards in self.shards.items()
                for name, _ in (*modules[s].named_parameters(), *modules[s].named_buffers())
            }
        )
