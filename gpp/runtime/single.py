"""The reference: the user's own module, eager, whole mini-batches, one device, no graph and no messages."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, final

from gpp.plan import Plan
from gpp.runtime.engine import AbstractEngine, Outcome, Progress
from gpp.runtime.job import Job


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Single(AbstractEngine):
    """Trains the model as PyTorch alone would: what every strategy's loss and weights must equal."""

    needs_weights: ClassVar[bool] = True
    one_stage: ClassVar[bool] = True
    name: str = "single"

    @property
    def worker_settings(self) -> dict[str, Any]:
        return {}

    def check(self, plan: Plan) -> tuple[str, ...]:
        return ()

    def execute(self, job: Job, run_dir: Path, progress: Progress) -> Outcome:
        from gpp.runtime.controller import collect, run_workers

        return collect(job, run_dir, run_workers("gpp.runtime.single_worker", job, run_dir, 1, progress))
