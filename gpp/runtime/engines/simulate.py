"""The engine that runs nothing: the prediction is the result. No torch is needed."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, final

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
    name: str = "simulate"

    def execute(self, job: Job, run_dir: Path, progress: Progress) -> Outcome:
        return Outcome()
