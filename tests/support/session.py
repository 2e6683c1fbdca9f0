"""Several jobs one after the other in the same worker processes: starting processes takes longer than the jobs.

`python -m tests.support.session FOLDER` under RANK and WORLD_SIZE; FOLDER/jobs.json lists [worker module, run directory].
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

ROOT = Path(__file__).resolve().parents[2]


STILL_S = 120.0
"""How long no process of a set may compute before the set counts as hanging; a busy machine makes no difference to that."""


def run_all(folder: Path, jobs: list[tuple[str, Path]], world: int) -> None:
    """Run the jobs on `world` ranks; a job that fails leaves its traceback in its run directory, and the rest run without it."""
    while jobs:
        for _, run_dir in jobs:
            (run_dir / "ranks").mkdir(exist_ok=True)
        codes = _wait(_start(folder, jobs, world))
        if all(code == 0 for code in codes):
            return
        started = [i for i, (_, run_dir) in enumerate(jobs) if any((run_dir / "ranks").glob("started_*"))]
        last = max(started, default=0)
        ranks = jobs[last][1] / "ranks"
        if not any(ranks.glob("failed_*.txt")):
            said = "\n".join((folder / f"out_{rank}.txt").read_text() for rank in range(world))
            (ranks / "failed_all.txt").write_text(f"the processes ended with {codes}:\n{said}")
        jobs = jobs[last + 1 :]


def _start(folder: Path, jobs: list[tuple[str, Path]], world: int) -> list[subprocess.Popen[bytes]]:
    (folder / "jobs.json").write_text(json.dumps([[module, str(run_dir)] for module, run_dir in jobs]))
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
            command = [sys.executable, "-m", "tests.support.session", str(folder)]
            processes.append(subprocess.Popen(command, env=env, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT))
    return processes


def _wait(processes: list[subprocess.Popen[bytes]]) -> list[int | None]:
    """Wait until all have ended or one has failed; returns their exit codes, None for those that did not end by themselves."""
    computed_s, since = 0.0, time.monotonic()
    try:
        while time.monotonic() < since + STILL_S:
            codes = [process.poll() for process in processes]
            if any(codes) or None not in codes:
                return codes
            seen = [kernel.process(process.pid) for process in processes]
            now_s = sum(state.cpu_s for state in seen if state is not None)
            if now_s > computed_s + 0.1:
                computed_s, since = now_s, time.monotonic()
            time.sleep(0.05)
        return codes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _main(folder: Path) -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    for module, where in json.loads((folder / "jobs.json").read_text()):
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


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
