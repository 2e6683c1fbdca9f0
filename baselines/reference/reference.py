"""Engine of one process: it computes what the plan's pipeline computes, one micro-batch after the other.

Every pass uses the version of the weights that the policy's table names, so losses and weights are those of the real
run, and a pipeline of any depth learns on one core. The time of such a run says nothing of a pipeline's time.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar, final

from gpp.cluster import Cluster
from gpp.errors import InvalidConfig, UnsupportedPlan
from gpp.graph.captured import LOSS, with_total
from gpp.plan.plan import Plan
from gpp.planners.base import AbstractPlanner
from gpp.runtime.engine import VERSIONS, AbstractServer, Progress, refuse_split_operators
from gpp.runtime.job import Job, job_parts
from gpp.runtime.task import EngineTask
from gpp.settings import settings
from gpp.timeline import Outcome, Versions


@final
@settings("engine")
class Reference(AbstractServer):
    """Computes on the CPU, whatever the devices of the cluster; has no measured timeline.

    Policies for memory change nothing of what is computed, and it ignores them.

    It saves and resumes with an empty pipeline only: it ignores micro-batches in flight in a checkpoint.
    """

    own_runtime: ClassVar[bool] = True
    needs_weights: ClassVar[bool] = True
    overwrites: ClassVar[bool] = False
    planner: ClassVar[AbstractPlanner | None] = None
    name: str = "reference"

    @property
    def worker_settings(self) -> dict[str, Any]:
        return {"device_kind": "cpu"}

    def devices_here(self, cluster: Cluster) -> int:
        return 0

    def check(self, plan: Plan) -> tuple[str, ...]:
        _refuse(plan)
        return ()

    def refuse_plan(self, plan: Plan, task: EngineTask) -> None:
        _refuse(plan)
        for part in job_parts(plan.mechanisms):
            part.refuse_plan(plan, task)

    def refuse(self, job: Job) -> None:
        _refuse(job.plan)
        settings = job.settings
        if job.streams and settings.checkpoint_every and not settings.checkpoint_drain:
            rule = f"engine={self.name} saves where the pipeline is empty, and here it is not"
            raise InvalidConfig("checkpoint.every", settings.checkpoint_every, rule, "set checkpoint.drain=true")

    def execute(self, job: Job, run_dir: Path, progress: Progress) -> Outcome:
        from gpp.runtime.controller.controller import run_workers

        if job.settings.course is not None:
            # One after the other: the times say nothing of a pipeline's.
            run_workers("baselines.reference.serving", job, run_dir, 1, progress)
            return Outcome()
        logs = run_workers("baselines.reference.worker", job, run_dir, 1, progress)
        steps = [with_total(logs.losses[step]) for step in sorted(logs.losses)]
        counted = json.loads((run_dir / "ranks" / VERSIONS).read_text())
        return Outcome(
            losses=tuple(losses[LOSS] for losses in steps),
            terms={name: tuple(losses[name] for losses in steps) for name in (steps[0] if steps else ()) if name != LOSS},
            evaluations=tuple({"step": done, **with_total(values)} for done, values in sorted(logs.evaluations.items())),
            versions=Versions(**{what: {int(s): n for s, n in of.items()} for what, of in counted.items()}),
        )


def _refuse(plan: Plan) -> None:
    """Refuse a plan that this engine cannot follow.

    Raises:
        UnsupportedPlan: names the stage.
    """
    refuse_split_operators(plan, "engine=reference")
    for s, stage in enumerate(plan.stages):
        if stage.stride > 1:
            raise UnsupportedPlan(
                f"stage {s}: its replicas take micro-batches in turn, which engine=reference does not follow. "
                "Fix: strategy.replicas=split, or engine=distributed"
            )
