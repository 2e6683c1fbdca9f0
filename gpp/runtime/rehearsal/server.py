"""The process that rehearses: `python -m gpp.runtime.rehearsal.server` reads a folder with a job from each line.

Before the folder stands the number of processors that the job's workers may use, 0 for all.

It loads torch once and forks the workers of each job, so a rehearsal begins in a tenth of a second. It answers with the
exit code of the workers, a line each, and ends with its standard input or with the controller.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from gpp.cost.load import busy_s
from gpp.files import folder as make_folder
from gpp.files import open_binary, write_text
from gpp.runtime.worker.parent import end_with_parent

READY = "ready"


def main() -> None:
    """The whole process."""
    family = end_with_parent()  # before torch is imported, which takes seconds
    import torch
    import torch._dynamo  # torch's optimizers load it when the first of them is made

    import gpp.runtime.worker.worker  # noqa: F401  (what is loaded now, no worker has to load)
    from gpp.runtime.job import Job
    from gpp.runtime.worker.forked import run_forked
    from gpp.runtime.worker.process import guarded

    torch.set_num_threads(1)  # a pool of threads would not survive a fork
    gc.freeze()
    print(READY, flush=True)
    for line in sys.stdin:
        processors, _, name = line.rstrip("\n").partition(" ")
        folder, allowed = Path(name), sorted(os.sched_getaffinity(0))[: int(processors) or None]
        code = 1
        try:
            job = Job.load(folder)
            make_folder(folder / "ranks")
            world = len(job.program.actions)

            def worker(rank: int, folder: Path = folder, job: Job = job, world: int = world, allowed: list[int] = allowed) -> None:
                os.sched_setaffinity(0, allowed)
                os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
                with open_binary(folder / "ranks" / f"rank_{rank}.err") as errors:
                    for stream, target in ((errors.fileno(), 1), (errors.fileno(), 2), (os.open(os.devnull, os.O_RDONLY), 0)):
                        os.dup2(stream, target)
                guarded(folder, _run, job)

            code = run_forked(worker, world, folder / "ranks", family)
        finally:
            print(code, flush=True)


def _run(job: Any, run_dir: Path, rank: int, world: int, device: Any) -> None:
    """One worker: all steps of the job, and what each took, into `ranks/device_N.json`."""
    from gpp.runtime.cards.card import CudaCard
    from gpp.runtime.mode import course_run
    from gpp.runtime.stretches import stretch_at
    from gpp.runtime.worker.clock import HostClock
    from gpp.runtime.worker.process import disconnect, enter
    from gpp.runtime.worker.worker import Worker

    card = CudaCard(device) if device.type == "cuda" else None
    seat = enter(job, run_dir, rank, world, device, card)
    # Seconds that the worker has computed: neither other programs nor workers on the same core count.
    computed = card is None and job.settings.threads == 1
    marks = MarkedClock()
    if computed:
        seat = replace(seat, clock=HostClock(marks.now))
        seat.transport.finished = marks.now
    ends: list[tuple[float, ...]] = []
    log = partial(_log, ends, time.thread_time if computed else time.perf_counter)
    if (course := course_run(job)) is not None:
        _write(run_dir, seat.device_id, course.rehearse(job, run_dir, seat, log), ends, marks)
        disconnect(seat.status)
        return
    worker = Worker(job, run_dir, seat)
    worker.kept = type(worker.kept)()  # of every step
    step = job.settings.first_step
    while step < job.settings.steps:
        first, count = stretch_at(job, step)
        worker.train(first, count, log)
        step = first + count
    _write(run_dir, seat.device_id, worker.kept, ends, marks)
    disconnect(seat.status)


class MarkedClock:
    """A clock of the seconds that its thread has computed, which remembers the wall's time at every mark."""

    def __init__(self) -> None:
        self.wall_s: dict[float, float] = {}

    def now(self) -> float:
        mark = time.thread_time()
        self.wall_s[mark] = time.perf_counter()
        return mark


def _write(run_dir: Path, device_id: int, kept: Any, ends: list[tuple[float, ...]], marks: MarkedClock) -> None:
    steps, wall_s = list(kept), marks.wall_s
    # Of each event its seconds by the wall's clock, where both of its marks are ours.
    walls = [
        [wall_s[end] - wall_s[start] if {start, end} <= wall_s.keys() else None for *_, start, end, _ in step["events"]]
        for step in steps
    ]
    record = {"device": device_id, "steps": steps, "walls": walls, "ends": ends}
    write_text(run_dir / "ranks" / f"device_{device_id}.json", json.dumps(record), exact=True)


def _log(ends: list[tuple[float, ...]], computed: Any, record: dict[str, Any]) -> None:
    if "step" in record:
        ends.append((computed(), time.perf_counter(), time.process_time(), busy_s()))


if __name__ == "__main__":
    main()
