"""The reference: the user's own module, eager, on one device, without graph and messages."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, final

from baselines.whole_model import refuse_several_stages, refuse_trained_loss
from gpp.cluster import Cluster
from gpp.plan.plan import Plan
from gpp.planners.base import AbstractPlanner
from gpp.planners.chains import single
from gpp.runtime.engine import AbstractEngine, Progress
from gpp.runtime.job import Job
from gpp.runtime.task import EngineTask
from gpp.settings import settings
from gpp.timeline import Outcome


@final
@settings("engine")
class Single(AbstractEngine):
    """Training as PyTorch alone would do it; every strategy's loss and weights must equal its own.

    With `microbatch_size` it adds up the gradients of micro-batches; without, the mini-batch is one piece.
    """

    needs_weights: ClassVar[bool] = True
    planner: ClassVar[AbstractPlanner | None] = single.Single()
    name: str = "single"

    @property
    def worker_settings(self) -> dict[str, Any]:
        return {}

    def devices_here(self, cluster: Cluster) -> int:
        return 1

    def check(self, plan: Plan) -> tuple[str, ...]:
        refuse_several_stages(plan, self.name)
        return ()

    def refuse_plan(self, plan: Plan, task: EngineTask) -> None:
        refuse_several_stages(plan, self.name)

    def refuse(self, job: Job) -> None:
        refuse_trained_loss(job, self.name)

    def execute(self, job: Job, run_dir: Path, progress: Progress) -> Outcome:
        from gpp.runtime.controller.collected import collect
        from gpp.runtime.controller.controller import run_workers

        refuse_several_stages(job.plan, self.name)
        return collect(job, run_dir, run_workers("baselines.whole_model_worker", job, run_dir, 1, progress))
