"""The engine that runs nothing: the prediction is the result. No torch is needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, final

from gpp.cluster import Cluster
from gpp.plan.plan import Plan
from gpp.planners.base import AbstractPlanner
from gpp.runtime.engine import AbstractServer, Progress
from gpp.runtime.job import Job
from gpp.settings import settings
from gpp.timeline import Outcome


@final
@settings("engine")
class Simulate(AbstractServer):
    """Predicts only."""

    runs: ClassVar[bool] = False
    own_runtime: ClassVar[bool] = True
    needs_weights: ClassVar[bool] = False
    planner: ClassVar[AbstractPlanner | None] = None
    name: str = "simulate"

    @property
    def worker_settings(self) -> dict[str, Any]:
        return {}

    def devices_here(self, cluster: Cluster) -> int:
        return 0

    def check(self, plan: Plan) -> tuple[str, ...]:
        return ()

    def execute(self, job: Job, run_dir: Path, progress: Progress) -> Outcome:
        return Outcome()
