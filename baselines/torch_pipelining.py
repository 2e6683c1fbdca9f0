"""torch.distributed.pipelining as an engine: chains of stages under its schedules."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Literal, final

from baselines.chain import INSTEAD, measured_by_events, refuse_shared_devices, refuse_what_is_no_chain
from gpp.cluster import Cluster
from gpp.errors import UnsupportedPlan
from gpp.plan.chain import device_order, refuse_early_loss
from gpp.plan.plan import Plan
from gpp.planners.base import AbstractPlanner
from gpp.runtime.devices import check_interface
from gpp.runtime.engine import AbstractEngine, Progress, crowded, task_of
from gpp.runtime.job import Job
from gpp.runtime.task import EngineTask
from gpp.settings import Seconds, settings
from gpp.timeline import Outcome


@final
@settings("engine")
class TorchPipelining(AbstractEngine):
    """A plan's stages in their topological order, one PipelineStage each, with given shapes.

    Args:
        schedule: torch's name of the schedule.
        interface: network interface to bind; loopback unless the user names another.
        timeout_s: seconds after which a worker that waits for a message gives up.
    """

    needs_weights: ClassVar[bool] = True
    planner: ClassVar[AbstractPlanner | None] = None
    name: str = "torch_pipelining"
    schedule: Literal["GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble"] = "1F1B"
    interface: str = "lo"
    timeout_s: Seconds = 600.0

    @property
    def worker_settings(self) -> dict[str, Any]:
        return {"interface": self.interface, "timeout_s": self.timeout_s, "engine": {"schedule": self.schedule}}

    def devices_here(self, cluster: Cluster) -> int:
        return cluster.num_devices

    def check(self, plan: Plan) -> tuple[str, ...]:
        self._refuse(plan)
        check_interface(self.interface)
        return crowded(plan)

    def refuse_plan(self, plan: Plan, task: EngineTask) -> None:
        self._refuse(plan)
        refuse_early_loss(plan, task.losses, f"engine={self.name}", INSTEAD)

    def _refuse(self, plan: Plan) -> None:
        """Refuse what torch's schedules cannot run.

        Raises:
            UnsupportedPlan: the plan is no such chain, has too few micro-batches, or stages elsewhere than the schedule does.
        """
        refuse_what_is_no_chain(plan, self.name)
        devices, count = device_order(plan), plan.minibatch_size // plan.stages[0].microbatch_size
        if self.schedule in ("GPipe", "1F1B"):
            refuse_shared_devices(plan, f"torch's {self.schedule}")
        elif self.schedule == "ZBVZeroBubble":
            self._check_placement(plan, [*devices, *reversed(devices)], "down the devices and up again, two stages each")
        else:
            rounds = -(-len(plan.stages) // len(devices))
            self._check_placement(plan, [*devices] * rounds, "round and round the devices")
        if self.schedule == "1F1B" and count < len(plan.stages):
            raise UnsupportedPlan(
                f"torch's 1F1B needs at least as many micro-batches as stages, {len(plan.stages)}, and there are {count}. "
                f"Fix: microbatch_size={max(1, plan.minibatch_size // len(plan.stages))} or less, or engine.schedule=GPipe"
            )
        if self.schedule.startswith("Interleaved") and count % max(1, count // len(devices)):
            raise UnsupportedPlan(
                f"torch's {self.schedule} runs {max(1, count // len(devices))} rounds of equally many micro-batches, "
                f"and there are {count}. Fix: another microbatch_size"
            )

    def _check_placement(self, plan: Plan, wanted: list[int], how: str) -> None:
        """Refuse other placements than those that torch's schedules of several stages a device have built in."""
        found = [stage.devices[0] for stage in plan.stages]
        if found != wanted:
            raise UnsupportedPlan(
                f"torch's {self.schedule} places stages {how}: on devices {wanted}, and the plan has them on {found}. "
                "Fix: another plan, or engine.schedule=1F1B"
            )

    def refuse(self, job: Job) -> None:
        self.check(job.plan)
        self.refuse_plan(job.plan, task_of(job))

    def execute(self, job: Job, run_dir: Path, progress: Progress) -> Outcome:
        from gpp.runtime.controller.controller import run_workers

        logs = run_workers("baselines.torch_pipelining_worker", job, run_dir, job.plan.num_devices, progress)
        return measured_by_events(job, run_dir, logs)
