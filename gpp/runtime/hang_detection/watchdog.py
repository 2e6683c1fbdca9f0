"""The watch of workers on several machines over each other: nobody else can see them all.

Each tells its status to the job's store every moment and reads the others'. When the run hangs, all of them see it,
write down the same diagnosis and end; a rank that is cut off sees nobody and ends as well.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist
from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

from gpp.runtime.hang_detection.diagnosis import Diagnosis
from gpp.runtime.hang_detection.status import ENDED, RankState, Status, status_path
from gpp.runtime.hang_detection.watch import Look, watch_of
from gpp.runtime.job import Job


class Watchdog:
    """Three threads: two tell the store and the shared folder and may block with them, one judges and never blocks.

    Args:
        store: the job's store; the threads use a connection of their own.
        report: called with the diagnosis; does not return.
    """

    def __init__(self, job: Job, ranks: Path, *, rank: int, world: int, store: Store, report: Callable[[Diagnosis], None]) -> None:
        settings = job.settings
        self._rank, self._world, self._report = rank, world, report
        self._status = Status(status_path(ranks, rank))
        self._store = store.clone()  # pyright: ignore[reportAttributeAccessIssue]
        self._seen = dict.fromkeys(range(world), RankState())
        self._period_s = min(1.0, settings.timeout_s / 10)
        self._watch = watch_of(job, heard=True)
        self._store.set(self._key(rank), self._status.encode())

    def start(self) -> None:
        """Begin to watch, once all ranks have a status in the store."""
        for run in (self._exchange, self._judge, self._share):
            threading.Thread(target=run, daemon=True).start()

    @staticmethod
    def _key(rank: int) -> str:
        return f"gpp/status/{rank}"

    def _ended(self) -> bool:
        return self._state().phase == ENDED

    def _state(self) -> RankState:
        return RankState.decode(self._status.encode())

    def _exchange(self) -> None:
        keys = [self._key(rank) for rank in range(self._world)]
        while True:
            ended = self._ended()
            try:
                self._store.set(self._key(self._rank), self._status.encode())
                if ended:
                    return
                for rank, record in enumerate(self._store.multi_get(keys)):
                    self._seen[rank] = RankState.decode(record)
            except (dist.DistError, RuntimeError):
                # The store is gone, with its machine or with the run: the others fall silent, which the judge sees.
                return
            time.sleep(self._period_s)

    def _judge(self) -> None:
        while not self._ended():
            # Whoever judges is alive.
            states = {**self._seen, self._rank: replace(self._state(), beat_ns=time.monotonic_ns())}
            looks = {rank: Look(state, None, state.cpu_ns * 1e-9) for rank, state in sorted(states.items())}
            diagnosis = self._watch.look(time.monotonic(), looks)
            if diagnosis and not self._ended():
                self._report(diagnosis)
                return
            time.sleep(self._period_s / 2)

    def _share(self) -> None:
        while not self._ended():
            self._status.share()
            time.sleep(self._period_s)
