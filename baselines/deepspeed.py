"""DeepSpeed's pipeline engine: chains of stages under its 1F1B."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, final

from baselines.chain import INSTEAD, measured_by_events, refuse_shared_devices, refuse_what_is_no_chain
from gpp.cluster import Cluster
from gpp.errors import InvalidConfig, UnsupportedPlan
from gpp.plan.chain import refuse_early_loss
from gpp.plan.plan import Plan
from gpp.planners.base import AbstractPlanner
from gpp.program.program import reduce_groups
from gpp.runtime.devices import check_interface
from gpp.runtime.engine import AbstractEngine, Progress, crowded, task_of
from gpp.runtime.job import Job
from gpp.runtime.task import EngineTask
from gpp.settings import Seconds, settings
from gpp.timeline import Outcome


@final
@settings("engine")
class DeepSpeed(AbstractEngine):
    """A plan's stages in their topological order, one layer of a PipelineModule each; ZeRO off.

    Args:
        interface: network interface to bind; loopback unless the user names another.
        timeout_s: seconds after which a worker that waits for a message gives up.
    """

    needs_weights: ClassVar[bool] = True
    planner: ClassVar[AbstractPlanner | None] = None
    name: str = "deepspeed"
    interface: str = "lo"
    timeout_s: Seconds = 600.0

    @property
    def worker_settings(self) -> dict[str, Any]:
        return {"interface": self.interface, "timeout_s": self.timeout_s}

    def devices_here(self, cluster: Cluster) -> int:
        return cluster.num_devices

    def check(self, plan: Plan) -> tuple[str, ...]:
        if find_spec("deepspeed") is None:
            raise InvalidConfig("engine", self.name, "needs the package deepspeed", "pip install -e '.[deepspeed]'")
        self._refuse(plan)
        check_interface(self.interface)
        return crowded(plan)

    def refuse_plan(self, plan: Plan, task: EngineTask) -> None:
        self._refuse(plan)
        refuse_early_loss(plan, task.losses, f"engine={self.name}", INSTEAD)
        _refuse_clipping_of_shared(plan, task)

    def refuse(self, job: Job) -> None:
        self.check(job.plan)
        self.refuse_plan(job.plan, task_of(job))

    def _refuse(self, plan: Plan) -> None:
        refuse_what_is_no_chain(plan, self.name)
        refuse_shared_devices(plan, "DeepSpeed")

    def execute(self, job: Job, run_dir: Path, progress: Progress) -> Outcome:
        from gpp.runtime.controller.controller import run_workers

        logs = run_workers("baselines.deepspeed_worker", job, run_dir, job.plan.num_devices, progress)
        return measured_by_events(job, run_dir, logs)


def _refuse_clipping_of_shared(plan: Plan, task: EngineTask) -> None:
    """Refuse clipping with shared parameters: DeepSpeed's norm counts one once for every stage that has a copy.

    Raises:
        UnsupportedPlan: a parameter is shared; the message names it.
    """
    groups = reduce_groups(plan, task.graph) if task.clips else ()
    if groups:
        raise UnsupportedPlan(
            f"{groups[0].params[0]} is in several stages, and DeepSpeed's norm of all gradients counts it for each. "
            "Fix: optimizer.clip_norm=null, or engine=distributed"
        )
