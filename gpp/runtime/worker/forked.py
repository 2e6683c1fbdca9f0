"""Many workers out of one process: forked, watched, and stopped together."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from gpp.errors import WorkerFailed
from gpp.runtime.worker.parent import PARENT, Family, end_with_parent, identity
from gpp.runtime.worker.process import report

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
    sys.stdout.flush()
    sys.stderr.flush()
    running: dict[int, int] = {}
    for rank in range(world):
        pid = os.fork()
        if pid == 0:
            os.environ[PARENT] = mine
            try:
                worker(rank)
            finally:
                os._exit(1)
        running[pid] = rank
    try:
        return _watch(running, ranks, family)
    finally:
        _stop(running)


def _watch(running: dict[int, int], ranks: Path, family: Family) -> int:
    """Wait until all have ended, one has failed, or whoever started this process is gone; returns the exit code."""
    code = 0
    while running and not code and family.alive():
        time.sleep(POLL_S)
        # All that have ended by now: whoever was killed counts, not those who have lost the connection to it.
        while running and (ended := os.waitpid(-1, os.WNOHANG))[0]:
            pid, status = ended
            rank = running.pop(pid)
            if status:
                code = 1
                signalled = -os.waitstatus_to_exitcode(status)
                if signalled > 0:
                    report(ranks, rank, WorkerFailed(rank, f"killed by {signal.Signals(signalled).name}"), "error")
    return code


def _stop(running: dict[int, int]) -> None:
    """End the workers that still run."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in running:
            os.kill(pid, number)
        until = time.monotonic() + GRACE_S
        while running and time.monotonic() < until:
            pid, _ = os.waitpid(-1, os.WNOHANG)
            if pid:
                running.pop(pid, None)
            else:
                time.sleep(POLL_S)
