"""Several jobs one after the other in the same worker processes: starting processes takes longer than the jobs.

`python -m tests.support.session FOLDER WORLD` imports what the jobs need and forks the ranks; FOLDER/jobs.json lists
[worker module, run directory].
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
import traceback
from pathlib import Path

import torch

from gpp.runtime.hang_detection import watch as kernel
from gpp.runtime.job import Job
from gpp.runtime.worker.forked import fork_workers

ROOT = Path(__file__).resolve().parents[2]


STILL_S = 120.0
"""How long no process of a set may compute before the set counts as hanging; a busy machine makes no difference to that."""

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


def _run(folder: Path, world: int) -> int | None:
    """Run the jobs of jobs.json; returns 0 if all ended well, None if nothing was computed for too long."""
    env = {**os.environ, "WORLD_SIZE": str(world), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.support.session", str(folder), str(world)]
    with open(folder / "out.txt", "w") as out:
        parent = subprocess.Popen(command, env=env, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT)
    computed_s, since = 0.0, time.monotonic()
    try:
        while parent.poll() is None and time.monotonic() < since + STILL_S:
            seen = [kernel.process(pid) for pid in (parent.pid, *_children(parent.pid))]
            now_s = sum(state.cpu_s for state in seen if state is not None)
            if now_s > computed_s + 0.1:
                computed_s, since = now_s, time.monotonic()
            time.sleep(0.05)
        return parent.poll()
    finally:
        # Its forks end with it.
        parent.kill()
        parent.wait()


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


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
