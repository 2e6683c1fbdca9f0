"""DeepSpeed's pipeline engine: chains of stages under its 1F1B."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, final

from baselines.chain import measured_by_events, refuse_early_loss, refuse_what_is_no_chain
from gpp.errors import InvalidConfig
from gpp.plan import Plan
from gpp.planners.base import AbstractPlanner
from gpp.runtime.engine import AbstractEngine, Outcome, Progress, check_timeout, crowded
from gpp.runtime.job import Job


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class DeepSpeed(AbstractEngine):
    """A plan's stages in their topological order, one layer of a PipelineModule each; ZeRO off.

    Args:
        gradient_clipping: norm of all gradients together above which they are scaled down; 0 for never.
        interface: network interface to bind; loopback unless the user names another.
        timeout_s: after which a worker that waits for a message gives up.
    """

    needs_weights: ClassVar[bool] = True
    planner: ClassVar[AbstractPlanner | None] = None
    name: str = "deepspeed"
    gradient_clipping: float = 0.0
    interface: str = "lo"
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        check_timeout(self.timeout_s)
        if not self.gradient_clipping >= 0:
            raise InvalidConfig(
                "engine.gradient_clipping", self.gradient_clipping, "must be at least 0", "set engine.gradient_clipping=0"
            )

    @property
    def worker_settings(self) -> dict[str, Any]:
        engine = {"gradient_clipping": self.gradient_clipping}
        return {"interface": self.interface, "timeout_s": self.timeout_s, "engine": engine}

    def check(self, plan: Plan) -> tuple[str, ...]:
        if find_spec("deepspeed") is None:
            raise InvalidConfig("engine", self.name, "needs the package deepspeed", "pip install 'gpp[deepspeed]'")
        refuse_what_is_no_chain(plan, self.name)
        return crowded(plan)

    def execute(self, job: Job, run_dir: Path, progress: Progress) -> Outcome:
        from gpp.runtime.controller import run_workers

        self.check(job.plan)
        refuse_early_loss(job, self.name)
        logs = run_workers("baselines.deepspeed_worker", job, run_dir, job.plan.num_devices, progress)
        return measured_by_events(job, run_dir, logs)
