"""The workers that answer requests, as engines start them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpp.runtime.engine import Progress
from gpp.runtime.job import Job
from gpp.runtime.mode import AbstractCourseRun
from gpp.runtime.run_dir import ANSWERS

if TYPE_CHECKING:
    from gpp.runtime.worker.seat import Seat
    from gpp.timeline import Outcome


WORKERS, EMULATED = "gpp.mechanisms.serving.server", "gpp.mechanisms.serving.emulated"
"""Modules whose `main` is a worker's whole process."""


class StreamRun(AbstractCourseRun):
    """Workers of a stream."""

    def check_room(self, job: Job, run_dir: Path) -> None:
        from gpp.mechanisms.serving.answers import check_room

        check_room(job, run_dir)

    def finish(self, run_dir: Path) -> tuple[Mapping[str, int] | None, str]:
        from gpp.mechanisms.serving.answers import finish

        count = finish(run_dir)
        if not count or count["answered"] == count["samples"]:
            return count, ""
        return count, (
            f"{ANSWERS} has answers to {count['answered']} of {count['samples']} samples: the rows of the others are "
            "NaN, and 0 where their type has no NaN; answered.NAME in the file says which are answers"
        )

    def execute(self, job: Job, run_dir: Path, progress: Progress, *, emulated: bool = False) -> Outcome:
        from gpp.mechanisms.serving.results import collect, collect_emulated
        from gpp.runtime.controller.controller import run_workers

        module, processes, collected = (EMULATED, 1, collect_emulated) if emulated else (WORKERS, None, collect)
        logs = run_workers(module, job, run_dir, job.plan.num_devices, progress, processes=processes)
        return collected(job, run_dir, logs.starts, logs.ends)

    def rehearse(self, job: Job, run_dir: Path, seat: Seat, log: Callable[[dict[str, Any]], None]) -> Sequence[dict[str, Any]]:
        import torch

        from gpp.mechanisms.serving.server import Server

        with torch.inference_mode():
            server = Server(job, run_dir, seat)
            server.kept = type(server.kept)()  # of every request
            server.warm_up()
            server.serve(log)
        return server.kept


RUN = StreamRun()
