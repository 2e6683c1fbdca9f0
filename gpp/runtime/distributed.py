"""The distributed engine: one worker process a device, gloo on CPU, NCCL on CUDA by the same code."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, final

from gpp.errors import InvalidConfig
from gpp.plan import Plan
from gpp.planners.base import AbstractPlanner
from gpp.runtime.engine import AbstractEngine, Outcome, Progress, check_timeout, crowded, refuse_what_does_not_run
from gpp.runtime.job import Job


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Distributed(AbstractEngine):
    """Runs a plan for real.

    Args:
        interface: network interface to bind; loopback unless the user names another.
        timeout_s: after which a worker that waits for a message gives up.
        autocast: bfloat16 or float16: forwards compute in it where PyTorch's autocast does; None: as captured.
        shared_memory: messages between workers of one machine go through memory that both have mapped; else through gloo.
        compile: torch.compile every stage with this backend (inductor, aot_eager); None: as captured.
    """

    needs_weights: ClassVar[bool] = True
    planner: ClassVar[AbstractPlanner | None] = None
    name: str = "distributed"
    interface: str = "lo"
    timeout_s: float = 600.0
    autocast: str | None = None
    compile: str | None = None
    shared_memory: bool = True

    def __post_init__(self) -> None:
        check_timeout(self.timeout_s)
        if self.autocast not in (None, "bfloat16", "float16"):
            raise InvalidConfig(
                "engine.autocast", self.autocast, "must be bfloat16, float16 or null", "set engine.autocast=bfloat16"
            )

    @property
    def worker_settings(self) -> dict[str, Any]:
        return {
            "interface": self.interface,
            "timeout_s": self.timeout_s,
            "autocast": self.autocast,
            "compile": self.compile,
            "shared_memory": self.shared_memory,
        }

    def check(self, plan: Plan) -> tuple[str, ...]:
        refuse_what_does_not_run(plan)
        return crowded(plan)

    def execute(self, job: Job, run_dir: Path, progress: Progress) -> Outcome:
        from gpp.runtime.controller import collect, run_workers

        refuse_what_does_not_run(job.plan)
        return collect(job, run_dir, run_workers("gpp.runtime.worker", job, run_dir, job.plan.num_devices, progress))
