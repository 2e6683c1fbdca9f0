"""The process of one worker: `python -m gpp.runtime.worker RUN_DIR` under RANK and WORLD_SIZE."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TextIO, TypeVar

import torch

from gpp.runtime.cards.cuda import CudaCard
from gpp.runtime.job import Job
from gpp.runtime.worker import course
from gpp.runtime.worker.clock import CardStatus
from gpp.runtime.worker.exchange import TorchExchange
from gpp.runtime.worker.limit import Limit
from gpp.runtime.worker.process import disconnect, enter, guarded, write_line
from gpp.runtime.worker.takeover import Takeover
from gpp.runtime.worker.worker import Worker

W = TypeVar("W", bound=Worker)


def run(job: Job, run_dir: Path, rank: int, world: int, device: torch.device) -> None:
    """Train as one worker of `job`, whose device in the plan follows from the rank."""
    work(job, run_dir, rank, world, device, Worker, _course)


def _course(worker: Worker, out: TextIO) -> None:
    """The whole job, whatever plans it takes."""
    course.run(worker, out, Takeover(TorchExchange(worker.job)) if worker.job.settings.replan_every else None)


def work(
    job: Job,
    run_dir: Path,
    rank: int,
    world: int,
    device: torch.device,
    kind: type[W],
    does: Callable[[W, TextIO], None],
) -> None:
    """Make a worker of some kind, let it do its work, and leave together with the others.

    Args:
        does: called with the worker and the file of its lines.
    """
    card = CudaCard(device) if device.type == "cuda" else None
    device_id, transport, status = enter(job, run_dir, rank, world, card)
    limit: Limit | None = None
    with ExitStack() as stack:
        if card:
            status = CardStatus(status, card)
            stack.enter_context(status.followed())
        if job.settings.enforce_memory:
            status = limit = Limit(job, device_id, status)
            stack.enter_context(limit.explained())
        if job.settings.replan_every:
            torch.optim.SGD([torch.zeros(1)])  # a process's first optimizer imports for seconds, and a plan's next one will not
        start = time.perf_counter()
        worker = kind(job, run_dir, device_id=device_id, device=device, transport=transport, status=status, card=card)
        built_s = time.perf_counter() - start
        if limit:
            limit.watch(worker)
        with open(run_dir / "ranks" / f"rank_{rank}.jsonl", "w") as out:
            if job.settings.replan_every:
                write_line(out, {"built_s": built_s})
            does(worker, out)
    disconnect(status)


def main(run_dir: Path) -> None:
    """The whole process; does not return."""
    guarded(run_dir, run)
