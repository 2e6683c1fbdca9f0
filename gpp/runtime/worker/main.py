"""The process of one worker: `python -m gpp.runtime.worker RUN_DIR` under RANK and WORLD_SIZE."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch
from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

from gpp.runtime.cards.cuda import CudaCard
from gpp.runtime.job import Job
from gpp.runtime.worker import course
from gpp.runtime.worker.clock import CardStatus
from gpp.runtime.worker.limit import Limit
from gpp.runtime.worker.process import disconnect, enter, guarded, open_lines, write_line
from gpp.runtime.worker.takeover import Takeover, TorchExchange
from gpp.runtime.worker.worker import Worker

W = TypeVar("W", bound=Worker)


def run(job: Job, run_dir: Path, rank: int, world: int, device: torch.device) -> None:
    """Train as one worker of `job`, whose device in the plan follows from the rank."""
    replanned = bool(job.settings.replan_every)
    with working(job, run_dir, rank, world, device, Worker) as worker, open_lines(run_dir, rank) as out:
        if replanned:
            write_line(out, {"built_s": worker.built_s})
        course.run(worker, out, Takeover(TorchExchange(job)) if replanned else None)


@contextmanager
def working(
    job: Job,
    run_dir: Path,
    rank: int,
    world: int,
    device: torch.device,
    kind: type[W],
    store: Store | None = None,
    ready: Callable[[], None] = lambda: None,
) -> Iterator[W]:
    """A worker of some kind that is connected with the others, and leaves together with them at the end.

    Args:
        store: in which all ranks meet, where the process is the user's own; None to open one.
        ready: called when all are connected, before the worker reads its weights.
    """
    card = CudaCard(device) if device.type == "cuda" else None
    if job.settings.replan_every:
        torch.optim.SGD([torch.zeros(1)])  # a process's first optimizer imports for seconds, and a plan's next one will not
        gc.freeze()  # workers come and go: a collection between two plans need not look at what was there before them
    seat = enter(job, run_dir, rank, world, device, card, store)
    ready()
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
