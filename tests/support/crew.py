"""Many short jobs on one set of real processes: four workers that start once and join one process group.

As a script, in a fork of the warm process, it reads the jobs FOLDER/*/job, forks, and runs one after the other, each through the
worker's own `run`: evaluations, logs and final weights are those of a run by itself.
"""

from __future__ import annotations

import os
import sys
import traceback
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from gpp.graph.captured import LOSS, with_total
from gpp.runtime.checkpoint.final import finish_final, load_final
from gpp.runtime.controller.controller import Follower
from gpp.runtime.engine import Progress
from gpp.runtime.job import Job
from gpp.runtime.transport.channels import TorchTransport
from gpp.runtime.worker.forked import fork_workers
from gpp.runtime.worker.main import course
from gpp.runtime.worker.seat import Seat
from gpp.runtime.worker.worker import Worker
from tests.support.cli import environment
from tests.support.warm import warm

WORLD = 4
TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Trained:
    """Losses of all steps, evaluations as {"step": ..., name: value}, final tensors by name."""

    losses: list[float]
    evaluations: list[dict[str, float]]
    state: dict[str, Tensor]


def train_all(jobs: dict[str, tuple[Job, dict[str, Tensor]]], folder: Path) -> dict[str, Trained]:
    """Run jobs of four devices each, given with their initial weights; keys are names of folders."""
    for name, (job, weights) in jobs.items():
        job.save(folder / name, weights)
    out = folder / "out.txt"
    code = warm().run([str(folder)], environment(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo"), out, script=__file__)
    assert code == 0, out.read_text()
    return {name: _read(job, folder / name) for name, (job, _) in jobs.items()}


def _read(job: Job, run_dir: Path) -> Trained:
    logs = Follower(run_dir / "ranks", WORLD, job.settings.minibatch_size, Progress())
    logs.poll()
    finish_final(job, run_dir)
    return Trained(
        [with_total(logs.losses[step])[LOSS] for step in sorted(logs.losses)],
        [{"step": done, **with_total(values)} for done, values in sorted(logs.evaluations.items())],
        load_final(run_dir),
    )


def _work(jobs: dict[Path, Job], folder: Path, rank: int) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), WORLD)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD, timeout=timedelta(seconds=TIMEOUT_S))
    for run_dir, job in jobs.items():
        devices = list(job.plan.devices)
        assert len(devices) == WORLD, f"{run_dir.name} has {len(devices)} devices"
        transport = TorchTransport(
            job.plan,
            job.graph,
            device=devices[rank],
            rank_of={device: r for r, device in enumerate(devices)},
            shared_memory=job.settings.shared_memory,
            timeout_s=TIMEOUT_S,
        )
        worker = Worker(job, run_dir, Seat(device_id=devices[rank], device=torch.device("cpu"), transport=transport))
        with open(run_dir / "ranks" / f"rank_{rank}.jsonl", "w") as out:
            course(worker, out)
    dist.barrier()
    # Without the interpreter's normal end, which would wait for gloo's threads.
    os._exit(0)


def _main(folder: Path) -> None:
    jobs = {path.parent: Job.load(path.parent) for path in sorted(folder.glob("*/job"))}
    for run_dir in jobs:
        (run_dir / "ranks").mkdir()
    (folder / "ranks").mkdir()

    def worker(rank: int) -> None:
        try:
            _work(jobs, folder, rank)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            raise

    fork_workers(worker, WORLD, folder / "ranks")


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
