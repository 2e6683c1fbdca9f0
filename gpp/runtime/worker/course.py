"""The course of a job on one device: every step, every evaluation, every checkpoint, a worker for each plan, the end."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any, TextIO

from gpp.runtime.hang_detection.status import CHECKPOINT
from gpp.runtime.stretches import stretch_at
from gpp.runtime.worker.process import Lines
from gpp.runtime.worker.takeover import Takeover
from gpp.runtime.worker.worker import Worker


def run(worker: Worker, out: TextIO, takeover: Takeover | None = None) -> Worker:
    """The whole job; one JSON line each to `out` for every step, evaluation and switch to another plan.

    Args:
        takeover: makes the worker of the next plan, where plans may be replaced.

    Returns:
        The worker that came to the end.

    Raises:
        NonFinite: a loss or the final weights are not finite, and the run is to stop then.
    """
    switch: Mapping[str, Any] = {}
    while True:
        lines = worker.listen(out)
        if switch:
            lines.write({**switch, "end": time.perf_counter()})
        with worker.search, ExitStack() as stack:
            stack.callback(worker.memory.end)
            stack.callback(lines.flush)
            found = _steps(worker, lines, takeover)
            if found is None:
                worker.finish()
                return worker
        worker, switch = found


def _steps(worker: Worker, lines: Lines, takeover: Takeover | None) -> tuple[Worker, Mapping[str, Any]] | None:
    """The steps under one plan; the worker that goes on under the next one, with the line of the switch, or None at the end."""
    settings = worker.job.settings
    step = settings.first_step
    while step < settings.steps:
        first, count = stretch_at(worker.job, step)
        worker.train(first, count, lines.step)
        step = done = first + count
        if worker.evaluation and (done == settings.steps or (settings.evaluate_every and done % settings.evaluate_every == 0)):
            lines.write({"evaluated": done, **worker.evaluate()})
        if worker.checkpoints.due(done):
            worker.memory.end()
            worker.status.enter(CHECKPOINT)
            worker.checkpoints.save(done)
        if takeover and done < settings.steps and done % settings.replan_every == 0:
            lines.flush()
            found = takeover.after(worker, done)
            if found is not None:
                return found
    return None
