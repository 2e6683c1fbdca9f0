"""Several jobs one after the other in the same worker processes: starting processes takes longer than the jobs.

As a script with FOLDER and WORLD, in a fork of the warm process, it imports what the jobs need and forks the ranks;
FOLDER/jobs.json lists [worker module, run directory].
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from pathlib import Path

import torch

from gpp.runtime.job import Job
from gpp.runtime.worker.forked import fork_workers
from tests.support.cli import environment
from tests.support.warm import warm

IMPORTS = {
    "baselines.deepspeed_worker": "deepspeed.pipe",
    "baselines.torch_pipelining_worker": "torch.distributed.pipelining",
}
"""What a worker's module imports when it runs: once, before the processes part."""


def run_all(folder: Path, jobs: list[tuple[str, Path]], world: int) -> None:
    """Run the jobs on `world` ranks; a job that fails leaves its traceback in its run directory, and the rest run without it."""
    while jobs:
        for _, run_dir in jobs:
            (run_dir / "ranks").mkdir(exist_ok=True)
        (folder / "jobs.json").write_text(json.dumps([[module, str(run_dir)] for module, run_dir in jobs]))
        code = _run(folder, world)
        if code == 0:
            return
        started = [i for i, (_, run_dir) in enumerate(jobs) if any((run_dir / "ranks").glob("started_*"))]
        last = max(started, default=0)
        ranks = jobs[last][1] / "ranks"
        if not any(ranks.glob("failed_*.txt")):
            (ranks / "failed_all.txt").write_text(f"the processes ended with {code}:\n{(folder / 'out.txt').read_text()}")
        jobs = jobs[last + 1 :]


def _run(folder: Path, world: int) -> int:
    """Run the jobs of jobs.json; returns 0 if all ended well."""
    env = environment(WORLD_SIZE=str(world), OMP_NUM_THREADS="1")
    return warm().run([str(folder), str(world)], env, folder / "out.txt", script=__file__)


def _work(jobs: list[tuple[str, str]], rank: int, world: int) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    torch.set_num_threads(1)
    for module, where in jobs:
        run_dir = Path(where)
        (run_dir / "ranks" / f"started_{rank}").touch()
        try:
            importlib.import_module(module)._run(Job.load(run_dir), run_dir, rank, world, torch.device("cpu"))
        except Exception:
            (run_dir / "ranks" / f"failed_{rank}.txt").write_text(traceback.format_exc())
            # The others wait for this rank.
            os._exit(1)
    sys.stdout.flush()
    os._exit(0)


def _main(folder: Path, world: int) -> None:
    jobs = json.loads((folder / "jobs.json").read_text())
    for module in {module for module, _ in jobs}:
        importlib.import_module(module)
        if module in IMPORTS:
            importlib.import_module(IMPORTS[module])
    (folder / "ranks").mkdir(exist_ok=True)
    fork_workers(lambda rank: _work(jobs, rank, world), world, folder / "ranks")


if __name__ == "__main__":
    _main(Path(sys.argv[1]), int(sys.argv[2]))
