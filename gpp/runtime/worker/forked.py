"""Many workers out of one process: forked, watched, and stopped together."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import wait
from pathlib import Path

from gpp.errors import WorkerFailed
from gpp.runtime.worker.parent import PARENT, Family, end_with_parent, identity
from gpp.runtime.worker.process import report

_FORK = get_context("fork")

POLL_S = 0.05
GRACE_S = 2.0
"""Seconds in which workers may end by themselves before they are killed."""


def fork_workers(worker: Callable[[int], None], world: int, ranks: Path) -> None:
    """Run forked workers (`run_forked`), and end this process with the code."""
    code = 1
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        code = run_forked(worker, world, ranks, end_with_parent())
    finally:
        os._exit(code)


def run_forked(worker: Callable[[int], None], world: int, ranks: Path, family: Family) -> int:
    """Fork `world` workers and wait for them; returns 0 if all of them ended with 0, else 1.

    The caller must not have started a thread. The first worker that fails ends the others. One that was killed could
    not say so itself, so `ranks/rank_N.error.json` is written for it.

    Args:
        worker: called with the rank in the child; does not return.
        family: the processes without which the workers end, too.
    """
    mine = identity()

    def child(rank: int) -> None:
        os.environ[PARENT] = mine
        try:
            worker(rank)
        finally:
            os._exit(1)

    running = {rank: _FORK.Process(target=child, args=(rank,)) for rank in range(world)}
    for process in running.values():
        process.start()
    code = 0
    try:
        while running and not code and family.alive():
            wait([process.sentinel for process in running.values()], POLL_S)
            # All that have ended by now: whoever was killed counts, not those who have lost the connection to it.
            for rank, ended in [(rank, process.exitcode) for rank, process in running.items()]:
                if ended is not None:
                    running.pop(rank)
                    code = code or int(ended != 0)
                    if ended < 0:
                        report(ranks, rank, WorkerFailed(rank, f"killed by {signal.Signals(-ended).name}"), "error")
        return code
    finally:
        until = time.monotonic() + GRACE_S
        for process in running.values():
            process.terminate()
        for process in running.values():
            process.join(max(0.0, until - time.monotonic()))
        for process in running.values():
            process.kill()
            process.join(GRACE_S)
