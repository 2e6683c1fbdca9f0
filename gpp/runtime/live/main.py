"""The process of a worker that trains step by step; its program is `gpp.runtime.live.crew`."""

from __future__ import annotations

import os
from multiprocessing.connection import Client
from pathlib import Path

import torch

from gpp.runtime.job import Job
from gpp.runtime.live.fed import ADDRESS, SECRET, tell
from gpp.runtime.live.worker import LiveWorker
from gpp.runtime.worker.main import working
from gpp.runtime.worker.process import guarded, open_lines


def run(job: Job, run_dir: Path, rank: int, world: int, device: torch.device) -> None:
    """Serve as one worker of `job`, until the program says that it ends."""
    with Client(os.environ[ADDRESS], "AF_UNIX", authkey=bytes.fromhex(os.environ.pop(SECRET))) as feed:
        tell(feed, {"rank": rank})
        with working(job, run_dir, rank, world, device, LiveWorker) as worker, open_lines(run_dir, rank) as out:
            worker.serve(feed, out)


def main(run_dir: Path) -> None:
    """The whole process; does not return."""
    guarded(run_dir, run)
