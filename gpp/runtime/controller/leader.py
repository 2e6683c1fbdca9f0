"""Rank 0 of a launch: the same command ran on every machine, under torchrun or srun (engine.launch=env).

Rank 0 is the controller: it plans, hands the job out through the store, follows the workers and writes the report.
Every process, rank 0 too, is the place of one worker and starts it as a child. The others
(`gpp.runtime.controller.attendant`) wait for the job, give signs of life, say how their worker ended, and end as rank 0
does: with its exit code, and its reason in one line.

Machines that do not see rank 0's run directory get the job's files into one of their own, under the same path; what
their workers write comes back to rank 0, final weights included.

Ranks that run the user's own program (`gpp.runtime.live.ranks`) get the job in the same way: `give`, and `take` of an attendant.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Self, final

from gpp.errors import InvalidConfig, WorkerFailed
from gpp.files import open_binary
from gpp.runtime.controller.board import LOST_S, Board, Inbox, Mail, open_store, send_file
from gpp.runtime.controller.controller import KINDS, POLL_S, Follower, by_signal, clear
from gpp.runtime.controller.follow import RankFiles, follow
from gpp.runtime.controller.place import LaunchPlace
from gpp.runtime.engine import Progress
from gpp.runtime.job import Job
from gpp.runtime.run_dir import RUN, RUN_DIR, run_of
from gpp.runtime.transport.network import attempt, of_this_attempt
from gpp.runtime.worker.parent import MODULE, PARENT, identity, worker_environment

END_S = 5.0
"""Seconds that a worker has to end after a signal."""


def log_of(run_dir: Path, rank: int) -> Path:
    """What the worker of a place prints."""
    return run_dir / "ranks" / f"rank_{rank}.log"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceWorker:
    """The worker of one place, a child of its process."""

    process: subprocess.Popen[bytes]

    @classmethod
    def start(cls, place: LaunchPlace, run_dir: Path, env: Mapping[str, str]) -> Self:
        """Start it; what it prints goes to ranks/rank_N.log."""
        own = {
            "RANK": place.rank,
            "LOCAL_RANK": place.local_rank,
            "WORLD_SIZE": place.world,
            "MASTER_ADDR": place.address,
            "MASTER_PORT": place.port,
            # The store is there already, whoever keeps it.
            "TORCHELASTIC_USE_AGENT_STORE": True,
            PARENT: identity(),
        }
        words = [sys.executable, "-m", MODULE, str(run_dir)]
        with open_binary(log_of(run_dir, place.rank)) as log:
            return cls(
                process=subprocess.Popen(
                    words,
                    env={**os.environ, **env, **{name: str(value) for name, value in own.items()}},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            )

    def end(self, patience_s: float) -> None:
        """Wait for its end for a while, then end it."""
        for stop in (lambda: None, self.process.terminate, self.process.kill):
            stop()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(patience_s)
                return
            patience_s = END_S


LEAVE_S = 5.0
"""Seconds that the others have to read how rank 0 ended."""

OUTPUT = re.compile(r"ranks/(rank|device)_[\w.]+|checkpoints/\.final/stage_[\w.]+")
"""Files that come back from the machines that do not see rank 0's folder."""

_BEGUN = "begun"
"""Key of the launch's store, which all its attempts share: the run directory of the latest one that had a job."""

_LAUNCHER, _KILLED, _ENDED, _STOPPED = range(4)
"""What is known of a rank that is gone; what comes first is the likelier cause."""


@final
class Leader:
    """Rank 0 of a launch, from its start to its end; as a context manager it is the process's own.

    Args:
        words: the command line, which is to be the same on every machine.
        limit_s: the limit for the others to come.
        part: of the launch's store, for one of several jobs of a launch.
        setting: the name of the run directory's setting.
    """

    running: ClassVar[Leader | None] = None

    def __init__(
        self, place: LaunchPlace, *, interface: str, words: list[str], limit_s: float, part: str = "", setting: str = RUN_DIR
    ) -> None:
        self.place, self._words, self._limit_s, self._setting = place, words, limit_s, setting
        self._launch = open_store(place, interface=interface, limit_s=limit_s)
        self.store = of_this_attempt(self._launch, part)
        self._others = range(1, place.world)
        self._board = Board(self.store, rank=0, reads=self._others)
        self._worker: PlaceWorker | None = None

    def __enter__(self) -> Self:
        Leader.running = self
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        Leader.running = None
        if error is not None:
            self.end(getattr(error, "exit_code", 1), str(error) or type(error).__name__)

    def check(self, devices: int, field: str) -> None:
        """Refuse another number of devices than processes were started.

        Args:
            field: what has the devices.

        Raises:
            InvalidConfig: names both numbers.
        """
        if devices != self.place.world:
            rule = f"every device is the place of a process, and {self.place.world} were started (WORLD_SIZE)"
            fix = f"start {devices} processes in all (torchrun: --nnodes, --nproc-per-node; srun: --ntasks)"
            more = f", or set it to {self.place.world}" if field == "cluster.num_devices" else ""
            raise InvalidConfig(field, devices, rule, f"{fix}{more}")

    @property
    def before(self) -> Path | None:
        """The run directory of the latest attempt before this one that had a job, if its run is still there."""
        if not (attempt() and self.place.agent and self._launch.check([_BEGUN])):
            return None
        said = json.loads(self._launch.get(_BEGUN))
        run = run_of(folder := Path(said["run_dir"]))
        return folder if run is not None and run.id == said["id"] else None

    def began(self, run_dir: Path, run: str) -> None:
        """Tell a later attempt where this one runs.

        Args:
            run: its identity, by which it is known there.
        """
        self._launch.set(_BEGUN, json.dumps({"run_dir": str(run_dir.resolve()), "id": run}))

    def run(self, job: Job, run_dir: Path, progress: Progress) -> Follower:
        """Hand the job out, start this place's worker, and follow all of them.

        Raises:
            WorkerFailed: one failed or is gone, or did not come in time.
            InvalidConfig: the job needs a folder that all machines see, and they see none.
        """
        apart, over = self._hand_out(job, run_dir, progress), threading.Event()
        inboxes = [Inbox(Mail(self.store, f"out/{rank}"), run_dir, OUTPUT.fullmatch) for rank in apart]
        threading.Thread(target=_take_all, args=(inboxes, over), daemon=True).start()
        self._worker = PlaceWorker.start(self.place, run_dir, worker_environment(job.settings.threads))
        try:
            return follow(job, run_dir, progress, over=self._over)
        finally:
            over.set()
            self._worker.end(0.0 if sys.exc_info()[0] else 2 * END_S)

    def _hand_out(self, job: Job, run_dir: Path, progress: Progress) -> list[int]:
        """Let every other process have the job; returns those whose machines got its files by the network."""
        clear(run_dir)
        files = sorted(path.relative_to(run_dir).as_posix() for path in (run_dir / "job").iterdir())
        run = run_of(run_dir)
        assert run is not None, "a run begins before it is handed out"
        sizes = {name: (run_dir / name).stat().st_size for name in files}
        self.began(run_dir, run.id)
        env = worker_environment(job.settings.threads)
        self._board.say(job={"run_dir": str(run_dir.resolve()), "id": run.id, "sizes": sizes, "env": env})
        self._wait("sees", f"have not come within {self._limit_s:g} s (engine.startup_timeout_s)")
        self._check_words()
        apart = [rank for rank in self._others if self._board.heard(rank)["sees"] is False]
        if apart:
            self._refuse_apart(job, apart[0], run_dir)
        for rank in apart:
            progress.say(f"rank {rank} on {self._host(rank)} does not see {run_dir}: it gets the job by the network")
            mail = Mail(self.store, f"job/{rank}")
            for name in (*files, RUN):
                send_file(mail, run_dir, name, self._raise_gone)
        return apart

    def give(self, job: Job, run_dir: Path, progress: Progress) -> None:
        """Hand the job out to processes that are workers themselves, as this one is; nothing more is said then.

        Raises:
            As `run` does.
        """
        self._hand_out(job, run_dir, progress)
        self._board.say(go=True)
        self._board.flush(LEAVE_S)
        self._board.close()

    def end(self, code: int, reason: str | None) -> None:
        """Tell the others how this process ends, and wait until they have read it."""
        first = reason.splitlines()[0] if reason else None
        self._board.say(end={"code": code, "reason": first})
        until = time.monotonic() + LEAVE_S
        while self._board.open and time.monotonic() < until:
            heard = [self._board.heard(rank) for rank in self._others]
            # Who comes later finds an agent's store, and no store of this process's.
            if all(words.get("left") or words.get("gone") or (self.place.agent and not words) for words in heard):
                break
            time.sleep(0.05)
        self._board.flush(1.0)
        self._board.close()

    def _host(self, rank: int) -> str:
        return self._board.heard(rank).get("host", "an unknown host")

    def _wait(self, word: str, late: str) -> None:
        """Until all others have said a word."""
        until = time.monotonic() + self._limit_s
        while missing := [rank for rank in self._others if word not in self._board.heard(rank)]:
            self._raise_gone()
            if time.monotonic() > until:
                names = f"ranks {', '.join(map(str, missing))}" if len(missing) > 1 else f"rank {missing[0]}"
                raise WorkerFailed(missing[0], f"{names} {late}")
            time.sleep(POLL_S)

    def _raise_gone(self) -> None:
        gone = self._gone()
        if gone:
            _, rank, reason = min(gone)
            raise WorkerFailed(rank, reason)

    def _check_words(self) -> None:
        for rank in self._others:
            words = self._board.heard(rank)["words"]
            if words != self._words:
                here, there = (
                    [word for word in one if word not in other] for one, other in ((self._words, words), (words, self._words))
                )
                rule = f"was started with other words ({' '.join(there) or 'fewer'}) than rank 0 ({' '.join(here) or 'fewer'})"
                raise WorkerFailed(rank, f"{rule}. Fix: run the same command on every machine")

    def _refuse_apart(self, job: Job, rank: int, run_dir: Path) -> None:
        """Refuse what is read and written on all machines, where they see no common folder."""
        settings = job.settings
        for field, value, fix in (
            ("checkpoint.every", settings.checkpoint_every, "set checkpoint.every=0"),
            ("resume", settings.resume, "leave resume out"),
        ):
            if value:
                rule = f"needs a folder that all machines see, and rank {rank} on {self._host(rank)} does not see {run_dir}"
                raise InvalidConfig(field, value, rule, f"set {self._setting} to a folder that all machines see, or {fix}")

    def _gone(self) -> list[tuple[int, int, str]]:
        """(what is known, rank, reason) of the others that are gone, and of workers that have failed."""
        out = []
        for rank in self._others:
            words, silent_s = self._board.heard(rank), self._board.silent_s(rank)
            if gone := words.get("gone"):
                out.append((_LAUNCHER if "launcher" in gone else _STOPPED, rank, f"{gone} (on {self._host(rank)})"))
            elif code := words.get("exit"):
                out.append(_exit(rank, code))
            elif silent_s > LOST_S:
                reason = f"{self._host(rank)} gives no sign of life for {silent_s:.0f} s: killed, stopped or cut off"
                out.append((_ENDED, rank, reason))
        if self._worker and (code := self._worker.process.poll()):
            out.append(_exit(0, code))
        return out

    def _over(self, ranks: RankFiles) -> WorkerFailed | None:
        """The facts about ranks that are gone, unless the workers' own reports tell the cause."""
        reported, cause = ranks.failed(), ranks.kinds() & set(KINDS[:2])
        known = [
            (what, rank, reason)
            for what, rank, reason in self._gone()
            if what <= _KILLED or (not cause and (what == _STOPPED or rank not in reported))
        ]
        gone = min(known, default=None)
        if gone is None:
            return None
        log = log_of(ranks.run_dir, gone[1])
        tail = log.read_text(errors="replace")[-4000:] if gone[0] == _ENDED and log.exists() else ""
        return WorkerFailed(gone[1], gone[2], tail)


def _exit(rank: int, code: int) -> tuple[int, int, str]:
    number = signal.SIGTERM if code == 128 + signal.SIGTERM else -code  # a worker notes this signal, and ends by itself
    if number <= 0:
        return _ENDED, rank, f"exit code {code}"
    return (_STOPPED if number == signal.SIGTERM else _KILLED), rank, by_signal(number)


def _take_all(inboxes: list[Inbox], over: threading.Event) -> None:
    """Write what other machines send, until the run is over."""
    while inboxes and not over.is_set():
        came = [inbox.take() is not None for inbox in inboxes]
        if not any(came):
            over.wait(POLL_S)
