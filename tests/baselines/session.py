"""Several jobs one after the other in the same worker processes: starting processes takes longer than the jobs.

`python -m tests.baselines.session FOLDER` under RANK and WORLD_SIZE; FOLDER/jobs.json lists [worker module, run directory].
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import traceback
from pathlib import Path

import torch

from gpp.runtime.job import Job

ROOT = Path(__file__).resolve().parent.parent.parent


def run_all(folder: Path, jobs: list[tuple[str, Path]], world: int) -> None:
    """Run the jobs on `world` ranks; a job that fails ends them all and leaves its traceback in its run directory."""
    (folder / "jobs.json").write_text(json.dumps([[module, str(run_dir)] for module, run_dir in jobs]))
    for _, run_dir in jobs:
        (run_dir / "ranks").mkdir(exist_ok=True)
    processes = []
    for rank in range(world):
        env = {
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
        }
        with open(folder / f"out_{rank}.txt", "w") as out:
            command = [sys.executable, "-m", "tests.baselines.session", str(folder)]
            processes.append(subprocess.Popen(command, env=env, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT))
    try:
        for process in processes:
            process.wait()
    finally:
        for process in processes:
            process.kill()


def _main(folder: Path) -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    for module, where in json.loads((folder / "jobs.json").read_text()):
        run_dir = Path(where)
        try:
            importlib.import_module(module)._run(Job.load(run_dir), run_dir, rank, world, torch.device("cpu"))
        except Exception:
            (run_dir / "ranks" / f"failed_{rank}.txt").write_text(traceback.format_exc())
            # The others wait for this rank.
            os._exit(1)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
