"""The controller's side of a run: start the workers, watch them, merge what they wrote."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest, Std, start_processes

from gpp.child import same_modules
from gpp.errors import WorkerFailed
from gpp.files import close_to_others, folder, open_binary
from gpp.graph.captured import LOSS, is_loss, with_total
from gpp.runtime.checkpoint.final import finish_final
from gpp.runtime.checkpoint.resume import drop_halves
from gpp.runtime.engine import GRADIENT_NORM, Progress, Taken
from gpp.runtime.hang_detection.watch import LocalWatch, said_pids, watch_of
from gpp.runtime.job import Job
from gpp.runtime.worker.announced import announced
from gpp.runtime.worker.parent import MODULE, PARENT, identity, worker_environment

POLL_S = 0.1
KINDS = ("error", "hang", "lost", "ended")
"""Kinds of the ranks' reports: all but the last two tell the cause of a failure, the last two only its consequences."""


def start_workers(
    module: str, job: Job, run_dir: Path, world: int, *, processes: int | None = None, more: Mapping[str, str] | None = None
) -> Any:
    """Start workers of a module as ranks 0..world-1 on this machine; torch's context of their processes.

    What they print goes to ranks/; what earlier ones left there is removed.

    Args:
        module: its `main` is a worker's whole process; see `gpp.runtime.worker.__main__`.
        processes: how many to start, where they are not one for each rank.
        more: environment variables beside those of a worker.
    """
    clear(run_dir)
    own = {
        "WORLD_SIZE": str(world),
        PARENT: identity(),
        **same_modules(),
        **worker_environment(job.settings.threads),
        **(more or {}),
    }
    envs = {rank: {"RANK": str(rank), "LOCAL_RANK": str(rank), **own} for rank in range(processes or world)}
    # Its log lines about a failure repeat, less clearly, what WorkerFailed says.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    logs = _Logs(log_dir=str(run_dir / "ranks"), redirects=Std.ALL)
    return start_processes("worker", sys.executable, {rank: ("-m", MODULE, str(run_dir), module) for rank in envs}, envs, logs)


class _Logs(DefaultLogsSpecs):
    """torch's files for what workers print, which torch opens with whatever rights the process gives, made before."""

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        found = super().reify(envs)
        for path in (*found.stdouts.values(), *found.stderrs.values()):
            for made in (Path(path).parent, Path(path).parent.parent):
                close_to_others(made)
            open_binary(path).close()
        return found


def run_workers(module: str, job: Job, run_dir: Path, world: int, progress: Progress, *, processes: int | None = None) -> Follower:
    """Start workers, wait until all have ended, and give the final weights their name; returns what the workers logged.

    Arguments as of `start_workers`.

    Raises:
        WorkerFailed: one died; the others have been stopped.
    """
    ranks = run_dir / "ranks"
    context = start_workers(module, job, run_dir, world, processes=processes)
    follow = Follower(ranks, world, job.settings.minibatch_size, progress, first_step=job.settings.first_step)
    watch = LocalWatch(watch=watch_of(job), ranks=ranks, pids=context.pids() if processes is None else {})
    try:
        while not all_ended(context, ranks):
            follow.poll()
            if follow.job is not None and follow.job is not job:
                job, watch.watch = follow.job, watch_of(follow.job)
            if len(watch.pids) < world:
                watch.pids = said_pids(ranks, world)
            if hang := watch.poll(time.monotonic()):
                watch.kill(hang.out)
                raise WorkerFailed(hang.rank, hang.reason, gone=hang.out)
    except WorkerFailed:
        follow.poll()  # the steps before
        raise
    finally:
        context.close(signal.SIGTERM, timeout=5)
    follow.poll(ended=True)
    finish_final(follow.job or job, run_dir)
    return follow


def all_ended(context: Any, ranks: Path, timeout_s: float = POLL_S) -> bool:
    """Whether all workers have come to their end, asked for a moment.

    Args:
        context: torch's of their processes; where one has failed, it stops the others.

    Raises:
        WorkerFailed: one has failed.
    """
    before = [rank for rank, pid in context.pids().items() if has_ended(pid)]
    result = context.wait(timeout=timeout_s, period=POLL_S)
    if result is None or not result.is_failed():
        return result is not None
    codes = {rank: failed.exitcode for rank, failed in result.failures.items()}
    # Who ended first did so by itself, or was ended by a stranger; the SIGTERM of those that follow is the context's.
    before = [rank for rank in before if rank in codes] or [next(iter(codes))]
    raise failure(ranks, {rank: code for rank, code in codes.items() if rank in before or code != -signal.SIGTERM}, result.stderrs)


def clear(run_dir: Path) -> None:
    """Empty the folder that the ranks write to, and drop halves of checkpoints."""
    drop_halves(run_dir)
    ranks = run_dir / "ranks"
    close_to_others(folder(ranks))
    for stale in ranks.iterdir():
        if stale.is_file():
            stale.unlink()
        else:  # the job of a plan that was announced
            shutil.rmtree(stale)


def failure(ranks: Path, codes: Mapping[int, int | None], stderrs: Mapping[int, str]) -> WorkerFailed:
    """The first cause of a failed run.

    That is a signal that we did not send, else a rank's own error, else what the ranks found out about a hang, else a
    rank that ended without a word, else a lost connection or the launcher's signal; the earliest of its kind.

    Args:
        codes: exit codes of the ranks that failed, without those that were stopped because of them; None for one that is gone
            and may have had any.
        stderrs: rank -> file of its standard error.
    """
    killed = {rank: -code for rank, code in sorted(codes.items()) if code is not None and code < 0}
    if killed:
        # Whoever sends SIGTERM to one may send it to all; the other signals are their own receiver's.
        first = min(killed, key=lambda rank: killed[rank] == signal.SIGTERM)
        return WorkerFailed(first, by_signal(killed[first]), _last_words(stderrs, first), gone=tuple(killed))
    reports = [json.loads(path.read_text()) for path in ranks.glob("rank_*.error.json")]
    # Among the ranks that saw a hang, the one that sees the most other ranks knows best.
    reports.sort(key=lambda r: (KINDS.index(r["kind"]), r["out"], r["rank"] if r["kind"] == "hang" else r["time"]))
    silent = sorted(set(codes) - {report["rank"] for report in reports})
    if reports and (reports[0]["kind"] in KINDS[:2] or not silent):
        return WorkerFailed(reports[0]["cause"], reports[0]["error"], reports[0]["traceback"])
    rank = min(silent or codes)
    tail = _last_words(stderrs, rank)
    if (code := codes[rank]) is None:
        return WorkerFailed(rank, "ended without a word: killed, or its machine is gone", tail, gone=(rank,))
    return WorkerFailed(rank, f"exit code {code}", tail)


def _last_words(stderrs: Mapping[int, str], rank: int) -> str:
    """The end of a rank's standard error."""
    path = Path(stderrs.get(rank, os.devnull))
    return path.read_text()[-4000:] if path.is_file() else ""


def deleted(rank: int, path: Path) -> WorkerFailed:
    """That a file of a rank is gone while the run is under way."""
    gone = f"{path} was deleted or moved while the run was under way, and what the workers write is lost"
    return WorkerFailed(rank, f"{gone}. Fix: start the run again, and leave its folder where it is until the end")


class Follower:
    """Reads the ranks' logs as they grow, reports every step that all of them have done, and keeps what they said.

    Args:
        first_step: of this run; the steps before it are another run's.
    """

    def __init__(self, folder: Path, world: int, minibatch_size: int, progress: Progress, first_step: int = 0) -> None:
        self.folder, self.world, self.minibatch_size, self.progress = folder, world, minibatch_size, progress
        self.first_step = self._reported = first_step
        self.losses: dict[int, dict[str, float]] = {}
        """Step -> `loss` and the terms of one that has several, each the sum of the ranks' shares."""
        self.norms: dict[int, float] = {}
        """Step -> the norm of all gradients, which every rank knows, where it was taken."""
        self.told: dict[int, dict[str, float]] = {}
        """Step -> what mechanisms say of it, by name."""
        self.evaluations: dict[int, dict[str, float]] = {}
        """Steps done -> result -> value, likewise."""
        self.starts: dict[int, float] = {}
        self.ends: dict[int, float] = {}
        """Step -> when the first rank began it and the last one ended it."""
        self.job: Job | None = None
        """That of the plan which has replaced the first one; None as long as none has."""
        self._at, self._done, self._pending = Counter[int](), dict[int, int](), Counter[int]()
        self._offsets: dict[int, float] = {}
        self._switches = defaultdict[int, list[dict[str, Any]]](list)

    def poll(self, *, ended: bool = False) -> None:
        """Read what is new; call the progress for every step that has become complete.

        Args:
            ended: whether all ranks have ended, so that each has left its file.

        Raises:
            WorkerFailed: what a rank has written is gone.
        """
        for rank in range(self.world):
            path = self.folder / f"rank_{rank}.jsonl"
            if not path.exists():
                if ended or self._at[rank]:
                    raise deleted(rank, path)
                continue
            with open(path, "rb") as file:
                file.seek(self._at[rank])
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    self._at[rank] += len(line)
                    self._take(rank, json.loads(line))
        complete = min((self._done.get(rank, self.first_step) for rank in range(self.world)), default=self.first_step)
        # By the workers' clocks; the first step has no beginning that says anything.
        since = self.ends.get(self._reported - 1)
        took = None if since is None or complete == self._reported else self.ends[complete - 1] - since
        for step in range(self._reported, complete):
            rate = None if took is None else (complete - self._reported) * self.minibatch_size / max(took, 1e-9)
            losses = with_total(self.losses[step]) if step in self.losses else {}
            norm = {GRADIENT_NORM: self.norms[step]} if step in self.norms else {}
            norm |= self.told.get(step, {})
            self.progress.on_terms({**{name: value for name, value in losses.items() if name != LOSS}, **norm})
            self.progress.on_step(step + 1, losses.get(LOSS), rate)
        self._reported = complete
        for done in sorted(step for step, count in self._pending.items() if count == self.world):
            self.progress.on_evaluation({"step": done, **with_total(self.evaluations[done])})
            del self._pending[done]

    def _take(self, rank: int, record: dict[str, Any]) -> None:
        if "warning" in record:
            self.progress.warn(record["warning"])
            return
        if "evaluated" in record:
            done = record.pop("evaluated")
            self._pending[done] += 1
            _add(self.evaluations.setdefault(done, {}), record)
            return
        if "built_s" in record:
            self.progress.on_built(rank, record["built_s"])
            return
        if "switched" in record:
            self._switched(record)
            return
        step = record["step"]
        if rank not in self._offsets:
            self._offsets[rank] = clock_offset_s(self.folder, rank)
        start, end = (record[name] + self._offsets[rank] for name in ("start", "end"))
        self._done[rank] = step + 1
        if GRADIENT_NORM in record:
            self.norms[step] = record[GRADIENT_NORM]
        if "told" in record:
            self.told.setdefault(step, {}).update(record["told"])
        if "pass_s" in record:
            self.progress.on_pass(rank, record["pass_s"])
        self.starts[step] = min(self.starts.get(step, start), start)
        self.ends[step] = max(self.ends.get(step, end), end)
        if losses := {name: value for name, value in record.items() if is_loss(name)}:
            _add(self.losses.setdefault(step, {}), losses)

    def _switched(self, record: dict[str, Any]) -> None:
        """A rank has taken another plan; when all have, that is the plan of the run."""
        number = record["switched"]
        said = self._switches[number]
        said.append(record)
        if len(said) == self.world:
            job = Job.load(announced(self.folder.parent, number))
            self.job = replace(job, settings=replace(job.settings, first_step=record["step"], resume=None))
            pause_s = max(one["end"] for one in said) - max(one["start"] for one in said)
            self.progress.on_taken(Taken(number, self.job, pause_s, sum(one["bytes"] for one in said)))


def _add(totals: dict[str, float], shares: dict[str, float]) -> None:
    for name, value in shares.items():
        totals[name] = totals.get(name, 0.0) + value


def clock_offset_s(ranks: Path, rank: int) -> float:
    """Seconds to add to a rank's clock to get rank 0's; 0 on one machine."""
    path = ranks / f"rank_{rank}.clock.json"
    return json.loads(path.read_text())["offset_s"] if path.exists() else 0.0


def has_ended(pid: int) -> bool:
    """Whether a child has ended; its exit code is left for whoever started it."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return False  # it was asked before


def by_signal(number: int) -> str:
    """That a signal has ended a worker, and who may have sent it."""
    senders = {
        signal.SIGABRT: "; a library ends its process so where it cannot go on, as without threads (ulimit -u) or memory",
        signal.SIGKILL: "; the kernel does that to a process when memory runs out",
        signal.SIGTERM: ", which this run did not send: a user, a scheduler or a shutdown of the machine did",
    }
    return f"killed by {signal.Signals(number).name}{senders.get(signal.Signals(number), '')}"
