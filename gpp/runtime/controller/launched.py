"""The processes of a launch: the same command ran on every machine, under torchrun or srun (engine.launch=env).

Rank 0 is the controller: it plans, hands the job out through the store, follows the workers and writes the report.
Every process, rank 0 too, is the place of one worker and starts it as a child. The others wait for the job, give signs
of life, say how their worker ended, and end as rank 0 does: with its exit code, and its reason in one line.

Machines that do not see rank 0's run directory get the job's files into one of their own, under the same path; what
their workers write comes back to rank 0, final weights included.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self, final

from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

from gpp.errors import GppError, InvalidConfig, WorkerFailed
from gpp.runtime.controller.board import LOST_S, Board, Inbox, Mail, open_store, send_file
from gpp.runtime.controller.controller import KINDS, Follower, clear, environment
from gpp.runtime.controller.follow import Ranks, follow
from gpp.runtime.controller.place import Place
from gpp.runtime.engine import Progress
from gpp.runtime.job import Job
from gpp.runtime.run_dir import RUN, RunDir, run_of, under_way
from gpp.runtime.worker.parent import MODULE, PARENT, identity

POLL_S = 0.1
LEAVE_S = 5.0
"""Seconds that the others have to read how rank 0 ended, and that a worker has to end."""

_JOB = re.compile(r"run\.json|job/[\w.]+")
_OUTPUT = re.compile(r"ranks/(rank|device)_[\w.]+|checkpoints/final/[\w.]+")

_LAUNCHER, _KILLED, _ENDED, _STOPPED = range(4)
"""What is known of a rank that is gone; what comes first is the likelier cause."""


class Ended(Exception):
    """Rank 0 has ended."""

    def __init__(self, code: int, reason: str | None) -> None:
        super().__init__(reason or "")
        self.code, self.reason = code, reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """The worker of one place, a child of its process."""

    process: subprocess.Popen[bytes]

    @classmethod
    def start(cls, place: Place, run_dir: Path, env: Mapping[str, str]) -> Self:
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
        with open(run_dir / "ranks" / f"rank_{place.rank}.log", "wb") as log:
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
            patience_s = LEAVE_S


@final
class Leader:
    """Rank 0 of a launch, from its start to its end; as a context manager it is the process's own.

    Args:
        words: the command line, which is to be the same on every machine.
        limit_s: the limit for the others to come.
    """

    running: ClassVar[Leader | None] = None

    def __init__(self, place: Place, *, interface: str, words: list[str], limit_s: float) -> None:
        self.place, self._words, self._limit_s = place, words, limit_s
        self._store = open_store(place, interface=interface, limit_s=limit_s)
        self._others = range(1, place.world)
        self._board = Board(self._store, rank=0, reads=self._others)
        self._worker: Worker | None = None

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

    def run(self, job: Job, run_dir: Path, progress: Progress) -> Follower:
        """Hand the job out, start this place's worker, and follow all of them.

        Raises:
            WorkerFailed: one failed or is gone, or did not come in time.
            InvalidConfig: the job needs a folder that all machines see, and they see none.
        """
        clear(run_dir)
        files = sorted(path.relative_to(run_dir).as_posix() for path in (run_dir / "job").iterdir())
        run = run_of(run_dir)
        assert run is not None, "a run begins before it is handed out"
        sizes = {name: (run_dir / name).stat().st_size for name in files}
        env = environment(job)
        self._board.say(job={"run_dir": str(run_dir.resolve()), "id": run.id, "sizes": sizes, "env": env})
        self._wait("sees", f"have not come within {self._limit_s:g} s (engine.startup_timeout_s)")
        self._check_words()
        apart = [rank for rank in self._others if self._board.heard(rank)["sees"] is False]
        if apart:
            self._refuse_apart(job, apart[0], run_dir)
            for rank in apart:
                progress.say(f"rank {rank} on {self._host(rank)} does not see {run_dir}: it gets the job by the network")
                mail = Mail(self._store, f"job/{rank}")
                for name in (*files, RUN):
                    send_file(mail, run_dir, name, self._raise_gone)
        over = threading.Event()
        inboxes = [Inbox(Mail(self._store, f"out/{rank}"), run_dir, _OUTPUT.fullmatch) for rank in apart]
        threading.Thread(target=_take_all, args=(inboxes, over), daemon=True).start()
        self._worker = Worker.start(self.place, run_dir, env)
        try:
            return follow(job, run_dir, progress, over=self._over)
        finally:
            over.set()
            self._worker.end(0.0 if sys.exc_info()[0] else 2 * LEAVE_S)

    def end(self, code: int, reason: str | None) -> None:
        """Tell the others how this process ends, and wait until they have read it."""
        first = reason.splitlines()[0] if reason else None
        self._board.say(end={"code": code, "reason": first})
        until = time.monotonic() + LEAVE_S
        while self._board.open and time.monotonic() < until:
            heard = [self._board.heard(rank) for rank in self._others]
            if all(words.get("left") or words.get("gone") or not words for words in heard):
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
                raise InvalidConfig(field, value, rule, f"set hydra.run.dir to a folder that all machines see, or {fix}")

    def _gone(self) -> list[tuple[int, int, str]]:
        """(what is known, rank, reason) of the others that are gone, and of workers that have failed."""
        out = []
        for rank in self._others:
            words, silent_s = self._board.heard(rank), self._board.silent_s(rank)
            if gone := words.get("gone"):
                out.append((_LAUNCHER if "launcher" in gone else _STOPPED, rank, f"on {self._host(rank)}: {gone}"))
            elif code := words.get("exit"):
                out.append(_exit(rank, code))
            elif silent_s > LOST_S:
                reason = f"{self._host(rank)} gives no sign of life for {silent_s:.0f} s: killed, stopped or cut off"
                out.append((_ENDED, rank, reason))
        if self._worker and (code := self._worker.process.poll()):
            out.append(_exit(0, code))
        return out

    def _over(self, ranks: Ranks) -> WorkerFailed | None:
        """What is known of ranks that are gone, unless the workers' own reports tell the cause."""
        gone = min(self._gone(), default=None)
        if gone is None or (gone[0] > _KILLED and ranks.kinds() & set(KINDS[:2])):
            return None
        log = ranks.folder / f"rank_{gone[1]}.log"
        tail = log.read_text(errors="replace")[-4000:] if gone[0] == _ENDED and log.exists() else ""
        return WorkerFailed(gone[1], gone[2], tail)


def _exit(rank: int, code: int) -> tuple[int, int, str]:
    if code >= 0:
        return _ENDED, rank, f"exit code {code}"
    memory = "; that is what the kernel does for want of memory" if -code == signal.SIGKILL else ""
    return (_STOPPED if -code == signal.SIGTERM else _KILLED), rank, f"killed by {signal.Signals(-code).name}{memory}"


def _take_all(inboxes: list[Inbox], over: threading.Event) -> None:
    """Write what other machines send, until the run is over."""
    while inboxes and not over.is_set():
        if not any([inbox.take() is not None for inbox in inboxes]):
            over.wait(POLL_S)


@final
class Attendant:
    """The process of another rank than 0: it waits for the job, holds the place of a worker, and ends as rank 0 does."""

    def __init__(self, place: Place, *, interface: str, words: list[str], limit_s: float) -> None:
        self._place, self._limit_s = place, limit_s
        self._store = open_store(place, interface=interface, limit_s=limit_s)
        self._board = Board(self._store, rank=place.rank, reads=[0])
        self._board.say(host=socket.gethostname(), words=words)
        self._worker: Worker | None = None
        self._directory: RunDir | None = None
        self._over = False

    def run(self) -> int:
        """From the start to the end; returns the exit code."""
        try:
            try:
                self._attend()
            except GppError as error:
                # Rank 0 knows best why, and says so; it may be what is gone.
                print(f"error: {error}", file=sys.stderr, flush=True)
                self._board.say(gone=str(error))
                self._end_worker(0.0)
                code = error.exit_code
                with suppress(WorkerFailed):
                    while True:
                        self._look()
                        time.sleep(POLL_S)
                return code
        except Ended as ended:
            if ended.code:
                print(f"error: rank 0 has ended with code {ended.code}: {ended.reason}", file=sys.stderr, flush=True)
            self._end_worker(0.0 if ended.code else 2 * LEAVE_S)
            return ended.code
        except BaseException as stopped:
            self._board.say(gone=str(stopped) or type(stopped).__name__)
            raise
        finally:
            self._over = True
            self._end_worker(0.0)
            if self._directory:
                self._directory.release()
            self._board.say(left=True)
            self._board.flush(2.0)
            self._board.close()

    def _attend(self) -> None:
        job = self._wait(lambda: self._board.heard(0).get("job"), "has handed out no job")
        run_dir = Path(job["run_dir"])
        if self._place.local_rank == 0:
            self._receive(job, run_dir)
        else:
            self._board.say(sees=None)
        self._wait(lambda: _sees(job, run_dir) or None, f"has sent no job below {run_dir}")
        (run_dir / "ranks").mkdir(exist_ok=True)
        self._worker = Worker.start(self._place, run_dir, job["env"])
        if self._directory:
            threading.Thread(target=self._send_back, args=(run_dir,), daemon=True).start()
        while True:
            self._look()
            if (code := self._worker.process.poll()) is not None:
                self._board.say(exit=code)
            time.sleep(POLL_S)

    def _wait(self, what: Callable[[], Any], late: str) -> Any:
        until = time.monotonic() + self._limit_s
        while (found := what()) is None:
            self._look()
            if time.monotonic() > until:
                raise WorkerFailed(0, f"{late} within {self._limit_s:g} s (engine.startup_timeout_s)")
            time.sleep(POLL_S)
        return found

    def _look(self) -> None:
        """Whether rank 0 is alive.

        Raises:
            Ended: it has ended, and said so.
            WorkerFailed: it is gone.
        """
        if end := self._board.heard(0).get("end"):
            raise Ended(end["code"], end["reason"])
        place = f"{self._place.address}:{self._place.port}"
        if not self._board.open:
            raise WorkerFailed(0, f"the store at {place} is gone: rank 0, its launcher or its machine has ended")
        if (silent_s := self._board.silent_s(0)) > LOST_S:
            raise WorkerFailed(
                0, f"rank 0 (store at {place}) gives no sign of life for {silent_s:.0f} s: killed, stopped or cut off"
            )

    def _receive(self, job: dict[str, Any], run_dir: Path) -> None:
        """See rank 0's run directory, or get the job into one of this machine's own, of the same path."""
        if _sees(job, run_dir):
            self._board.say(sees=True)
            return
        directory = RunDir(run_dir)
        try:
            directory.claim()
        except InvalidConfig:
            if (run := under_way(run_dir)) is None or run.id != job["id"]:
                raise
            # Rank 0 itself holds it: a shared file system that shows new files late.
            self._board.say(sees=True)
            return
        self._directory = directory
        directory.begin()
        self._board.say(sees=False)
        inbox = Inbox(Mail(self._store, f"job/{self._place.rank}"), run_dir, _JOB.fullmatch)
        failed: list[Exception] = []

        def receive() -> None:
            try:
                # The run's identity comes last: who sees it sees the whole job.
                while (name := inbox.take()) != RUN:
                    time.sleep(POLL_S if name is None else 0.0)
            except Exception as error:
                failed.append(error)

        thread = threading.Thread(target=receive, daemon=True)
        thread.start()
        self._wait(lambda: None if thread.is_alive() else True, f"has sent no job below {run_dir}")
        if failed:
            error = failed[0]
            raise error if isinstance(error, GppError) else WorkerFailed(self._place.rank, f"{run_dir} cannot be written: {error}")

    def _send_back(self, run_dir: Path) -> None:
        """Send what this machine's workers write; a worker's end only after everything that was written before it."""
        mail, sent = Mail(self._store, f"out/{self._place.rank}"), dict[str, tuple[int, int]]()

        def go_on() -> None:
            if self._over:
                raise Ended(0, None)

        with suppress(Ended, RuntimeError):
            while not self._over:
                ends = {path.relative_to(run_dir).as_posix() for path in run_dir.glob("ranks/rank_*.end.json")}
                found = [path for folder in ("checkpoints/final", "ranks") for path in sorted((run_dir / folder).glob("*"))]
                names = [path.relative_to(run_dir).as_posix() for path in found]
                late = [name for name in names if name.endswith(".end.json")]
                for name in (*(name for name in names if name not in late), *(name for name in late if name in ends)):
                    status = (run_dir / name).stat() if _OUTPUT.fullmatch(name) and not name.endswith(".new") else None
                    mark = status and (status.st_size, status.st_mtime_ns)
                    if mark is not None and (sent.get(name) != mark or name.endswith(".status")):
                        at = sent.get(name, (0, 0))[0] if name.endswith(".jsonl") else 0
                        size = send_file(mail, run_dir, name, go_on, at=at)
                        sent[name] = (size, mark[1])
                time.sleep(0.5)

    def _end_worker(self, patience_s: float) -> None:
        if self._worker:
            self._worker.end(patience_s)


def _sees(job: Mapping[str, Any], run_dir: Path) -> bool:
    """Whether a folder holds this job."""
    run = run_of(run_dir)
    if run is None or run.id != job["id"]:
        return False
    return all((run_dir / name).is_file() and (run_dir / name).stat().st_size == size for name, size in job["sizes"].items())
