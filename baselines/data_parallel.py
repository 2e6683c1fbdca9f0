"""PyTorch's DistributedDataParallel: the user's own module on every device, which gets a share of every micro-batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, final

from baselines.whole_model import refuse_several_stages, refuse_trained_loss
from gpp.cluster import Cluster
from gpp.plan.plan import Plan
from gpp.planners.base import AbstractPlanner
from gpp.planners.chains import data_parallel
from gpp.runtime.devices import check_interface
from gpp.runtime.engine import AbstractEngine, Progress, crowded
from gpp.runtime.job import Job
from gpp.runtime.task import EngineTask
from gpp.settings import Seconds, settings
from gpp.timeline import Outcome


@final
@settings("engine")
class DataParallel(AbstractEngine):
    """An engine that averages gradients in DDP's own buckets, which overlap with the backward of the last micro-batch.

    Args:
        interface: network interface to bind; loopback unless the user names another.
        timeout_s: seconds after which a worker that waits for the others gives up.
    """

    needs_weights: ClassVar[bool] = True
    planner: ClassVar[AbstractPlanner | None] = data_parallel.DataParallel()
    name: str = "data_parallel"
    interface: str = "lo"
    timeout_s: Seconds = 600.0

    @property
    def worker_settings(self) -> dict[str, Any]:
        return {"interface": self.interface, "timeout_s": self.timeout_s}

    def devices_here(self, cluster: Cluster) -> int:
        return cluster.num_devices

    def check(self, plan: Plan) -> tuple[str, ...]:
        refuse_several_stages(plan, self.name)
        check_interface(self.interface)
        return crowded(plan)

    def refuse_plan(self, plan: Plan, task: EngineTask) -> None:
        refuse_several_stages(plan, self.name)

    def refuse(self, job: Job) -> None:
        refuse_trained_loss(job, self.name)

    def execute(self, job: Job, run_dir: Path, progress: Progress) -> Outcome:
        from gpp.runtime.controller.collected import collect
        from gpp.runtime.controller.controller import run_workers

        refuse_several_stages(job.plan, self.name)
        return collect(job, run_dir, run_workers("baselines.whole_model_worker", job, run_dir, job.plan.num_devices, progress))
