"""Following workers that others start, by what they write into the run directory.

The folder is shared by the machines, or each machine's `ranks/` is copied into it later: both look alike.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from gpp.errors import WorkerFailed
from gpp.runtime.controller.controller import KINDS, POLL_S, Follower, clear, failure
from gpp.runtime.controller.slurm import Slurm, finish, word
from gpp.runtime.engine import Progress
from gpp.runtime.hang_detection.status import status_path
from gpp.runtime.job import Job
from gpp.runtime.transport.network import program_digest
from gpp.runtime.worker.parent import worker_environment

GRACE_S = 5.0
"""Seconds to wait for the other ranks' reports after the first one: together they tell what went wrong."""

SILENCE_S = 60.0
"""Seconds beyond the timeout that the whole run may be without a sign of life; the workers' own watch comes first."""


def machines(job: Job, nodes: int | None) -> tuple[int, ...]:
    """Workers of each machine, in the order of the ranks: by the cluster's nodes, or evenly on `nodes` machines."""
    devices = sorted(job.program.actions)
    if nodes is None:
        of = [job.cluster.nodes[device] for device in devices]
        changes = [i for i in range(1, len(of)) if of[i] != of[i - 1]]
        return tuple(b - a for a, b in zip([0, *changes], [*changes, len(of)], strict=True))
    return tuple((len(devices) * (i + 1)) // nodes - (len(devices) * i) // nodes for i in range(nodes))


def commands(job: Job, run_dir: Path, counts: Sequence[int], address: str, port: int) -> list[str]:
    """The command to type on each machine."""
    words = " ".join(f"{name}={value}" for name, value in worker_environment(job.settings.threads).items())
    return [
        f"{words} torchrun --nnodes {len(counts)} --node-rank {i} --nproc-per-node {count} "
        f"--master-addr {address} --master-port {port} -m gpp.runtime.worker {run_dir.resolve()}"
        for i, count in enumerate(counts)
    ]


class RankFiles:
    """Files that the ranks of a job have left in the run directory so far."""

    def __init__(self, job: Job, run_dir: Path) -> None:
        self.job, self.run_dir, self.folder = job, run_dir, run_dir / "ranks"
        self.world = len(job.program.actions)

    def ended(self) -> list[int]:
        """Ranks that have ended, all files of which are here whole: a copy of a folder has no order."""
        return [rank for rank in range(self.world) if self._whole(self.folder / f"rank_{rank}.end.json")]

    def _whole(self, end: Path) -> bool:
        try:
            sizes = json.loads(end.read_text()).get("files", {})
            return all((self.folder / name).stat().st_size >= size for name, size in sizes.items())
        except (OSError, ValueError):
            return False

    def failed(self) -> list[int]:
        return [rank for rank in range(self.world) if (self.folder / f"rank_{rank}.error.json").exists()]

    def kinds(self) -> set[str]:
        """Kinds of the ranks' reports of failures; see `gpp.runtime.controller.controller.KINDS`."""
        return {json.loads(path.read_text())["kind"] for path in self.folder.glob("rank_*.error.json")}

    def open(self) -> list[int]:
        """Ranks that have said neither that they ended nor that they failed."""
        return sorted(set(range(self.world)) - {*self.ended(), *self.failed()})

    def signs(self) -> list[bytes]:
        """A value that changes while any worker lives."""
        paths = [status_path(self.folder, rank) for rank in range(self.world)]
        return [path.read_bytes() if path.exists() else b"" for path in paths]

    def failure(self) -> WorkerFailed:
        """The first cause, where at least one rank has failed or ended without a word."""
        return failure(self.folder, dict.fromkeys(self.open()), {})

    def check(self) -> None:
        """Make sure that the workers that ended ran this very job.

        Raises:
            WorkerFailed: one ran another.
        """
        mine = program_digest(self.run_dir)
        for rank in self.ended():
            if json.loads((self.folder / f"rank_{rank}.end.json").read_text())["job"] != mine:
                fix = f"give the same words as for the run, and plan={self.run_dir}/job/plan.json"
                raise WorkerFailed(rank, f"ran another job than the one below {self.run_dir}. Fix: {fix}")


def gather(job: Job, run_dir: Path, progress: Progress) -> Follower:
    """Results that workers, all of which have ended, left in the run directory.

    Raises:
        WorkerFailed: one failed, has not ended, or ran another job.
    """
    ranks = RankFiles(job, run_dir)
    if ranks.failed():
        raise ranks.failure()
    if missing := ranks.open():
        which = ", ".join(f"ranks/rank_{rank}.end.json" for rank in missing)
        raise WorkerFailed(missing[0], f"has not ended, or its files are not here. Fix: copy every machine's ranks/ here ({which})")
    ranks.check()
    follow = Follower(ranks.folder, ranks.world, job.settings.minibatch_size, progress, first_step=job.settings.first_step)
    follow.poll(ended=True)
    return follow


def follow(
    job: Job, run_dir: Path, progress: Progress, over: Callable[[RankFiles], WorkerFailed | None] = lambda ranks: None
) -> Follower:
    """Follow workers that others have started, or are about to, until all have ended.

    Args:
        over: what is known of the workers' end from elsewhere; None while they may live. It counts more than their reports.

    Raises:
        WorkerFailed: one failed, or none gives a sign of life.
    """
    ranks = RankFiles(job, run_dir)
    logs = Follower(ranks.folder, ranks.world, job.settings.minibatch_size, progress, first_step=job.settings.first_step)
    limit_s = job.settings.timeout_s + SILENCE_S
    signs, heard_s, first_s = ranks.signs(), time.monotonic(), None
    while True:
        logs.poll()
        still, now_s = ranks.open(), time.monotonic()
        fresh = ranks.signs()
        if fresh != signs or not any(fresh):
            signs, heard_s = fresh, now_s
        if not still and not ranks.failed():
            ranks.check()
            logs.poll(ended=True)
            return logs
        known = over(ranks)
        if ranks.failed() or known:
            first_s = now_s if first_s is None else first_s
            # A lost connection is nobody's cause: the one to blame may not have been heard of yet.
            if (not still and (known or ranks.kinds() & set(KINDS[:2]))) or now_s - first_s > GRACE_S:
                raise known or ranks.failure()
        elif now_s - heard_s > limit_s:
            raise WorkerFailed(still[0], f"no worker has given a sign of life for {now_s - heard_s:.0f} s")
        time.sleep(POLL_S)


def run_external(job: Job, run_dir: Path, progress: Progress, counts: Sequence[int], address: str, port: int) -> Follower:
    """Say how to start the workers, and follow them.

    Args:
        counts: workers of each machine.

    Raises:
        WorkerFailed: one failed, or none gives a sign of life.
    """
    clear(run_dir)
    lines = commands(job, run_dir, counts, address, port)
    progress.say("start the workers:" if len(lines) == 1 else f"start the workers, one command on each of {len(lines)} machines:")
    for line in lines:
        progress.say(f"  {line}")
    progress.say(f"waiting for {sum(counts)} workers in {run_dir}/ranks (shared, or copied back to here)")
    return follow(job, run_dir, progress)


def run_slurm(job: Job, run_dir: Path, progress: Progress, slurm: Slurm, counts: Sequence[int]) -> Follower:
    """Submit the workers as a job, and follow them; the job never outlives the call.

    Raises:
        WorkerFailed: one failed, or the job is over before they ended.
    """
    clear(run_dir)
    settings = job.settings
    cuda = settings.device_kind == "cuda"
    submitted = slurm.submit(run_dir, counts, cuda=cuda, threads=settings.threads, env=worker_environment(job.settings.threads))
    progress.say(f"submitted job {submitted.job_id} of {sum(counts)} workers on {len(counts)} nodes ({run_dir}/slurm)")
    ended = False

    def over(ranks: RankFiles) -> WorkerFailed | None:
        still = ranks.open()
        text = word(submitted) if still and not ranks.failed() else None
        return WorkerFailed(still[0], text) if text else None

    try:
        logs = follow(job, run_dir, progress, over=over)
        ended = True
        return logs
    finally:
        finish(submitted, ended)
