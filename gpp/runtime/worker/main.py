"""The process of one worker: `python -m gpp.runtime.worker RUN_DIR` under RANK and WORLD_SIZE."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO, TypeVar

import torch
from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

from gpp.runtime.cards.card import CudaCard
from gpp.runtime.hang_detection.status import CHECKPOINT
from gpp.runtime.job import Job
from gpp.runtime.stretches import stretch_at
from gpp.runtime.worker.clock import CardStatus
from gpp.runtime.worker.limit import Limit
from gpp.runtime.worker.process import Lines, disconnect, enter, guarded, open_lines, write_line
from gpp.runtime.worker.takeover import Takeover, TorchExchange
from gpp.runtime.worker.worker import Worker


def course(worker: Worker, out: TextIO, takeover: Takeover | None = None) -> Worker:
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
            worker.status.enter(CHECKPOINT)
            with worker.memory.apart():
                worker.checkpoints.save(done)
        if takeover and done < settings.steps and done % settings.replan_every == 0:
            lines.flush()
            found = takeover.after(worker, done)
            if found is not None:
                return found
    return None


W = TypeVar("W", bound=Worker)


def run(job: Job, run_dir: Path, rank: int, world: int, device: torch.device) -> None:
    """Train as one worker of `job`, whose device in the plan follows from the rank."""
    replanned = bool(job.settings.replan_every)
    with working(job, run_dir, rank, world, device, Worker) as worker, open_lines(run_dir, rank) as out:
        if replanned:
            write_line(out, {"built_s": worker.built_s})
        course(worker, out, Takeover(TorchExchange(job)) if replanned else None)


@contextmanager
def working(
    job: Job,
    run_dir: Path,
    rank: int,
    world: int,
    device: torch.device,
    kind: type[W],
    store: Store | None = None,
) -> Iterator[W]:
    """A worker of some kind that is connected with the others, and leaves together with them at the end.

    Args:
        store: in which all ranks meet, where the process is the user's own; None to open one.
    """
    card = CudaCard(device) if device.type == "cuda" else None
    if job.settings.replan_every:
        torch.optim.SGD([torch.zeros(1)])  # a process's first optimizer imports for seconds, and a plan's next one will not
        gc.freeze()  # workers come and go: a collection between two plans need not look at what was there before them
    seat = enter(job, run_dir, rank, world, device, card, store)
    limit: Limit | None = None
    with ExitStack() as stack:
        if card:
            behind = CardStatus(seat.status, card)
            stack.enter_context(behind.followed())
            seat = replace(seat, status=behind)
        if job.settings.enforce_memory:
            limit = Limit(job, seat.device_id, seat.status)
            stack.enter_context(limit.explained())
            seat = replace(seat, status=limit)
        worker = kind(job, run_dir, seat)
        if limit:
            limit.watch(worker)
        yield worker
    disconnect(seat.status)


def main(run_dir: Path) -> None:
    """The whole process; does not return."""
    guarded(run_dir, run)
