"""The other processes of a launch than rank 0; see `gpp.runtime.controller.leader`."""

from __future__ import annotations

import re
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, final

from gpp.errors import GppError, InvalidConfig, WorkerFailed
from gpp.files import folder
from gpp.runtime.controller.board import LOST_S, Board, Inbox, Mail, open_store, send_file
from gpp.runtime.controller.controller import POLL_S, deleted
from gpp.runtime.controller.leader import END_S, OUTPUT, PlaceWorker, log_of
from gpp.runtime.controller.place import LaunchPlace
from gpp.runtime.run_dir import RUN, RUN_DIR, RunDir, holds, under_way
from gpp.runtime.transport.network import of_this_attempt

SEND_S = 0.5
"""Seconds between two looks at what the workers have written."""

_JOB = re.compile(r"run\.json|job/[\w.]+")


class Ended(Exception):
    """Rank 0 has ended."""

    def __init__(self, code: int, reason: str | None) -> None:
        super().__init__(reason or "")
        self.code, self.reason = code, reason


@final
class Attendant:
    """The process of another rank than 0: it waits for the job, holds the place of a worker, and ends as rank 0 does."""

    def __init__(
        self, place: LaunchPlace, *, interface: str, words: list[str], limit_s: float, part: str = "", setting: str = RUN_DIR
    ) -> None:
        self.place, self._limit_s, self._setting = place, limit_s, setting
        self.store = of_this_attempt(open_store(place, interface=interface, limit_s=limit_s), part)
        self._board = Board(self.store, rank=place.rank, reads=[0])
        self._board.say(host=socket.gethostname(), words=words)
        self._worker: PlaceWorker | None = None
        self._directory: RunDir | None = None
        self._over = False

    def run(self) -> int:
        """Attend a launch from its start to its end; returns the exit code."""
        try:
            try:
                self._attend()
            except GppError as error:
                # Rank 0 knows best why, and says so; it may be what is gone.
                print(f"error: {error}", file=sys.stderr, flush=True)
                self._board.say(gone=str(error).removeprefix(f"worker {self.place.rank} failed: "))  # rank 0 says whose it is
                self._end_worker(0.0)
                self._wait_for_end()
                return error.exit_code
        except Ended as ended:
            if ended.code:
                print(f"error: rank 0 has ended with code {ended.code}: {ended.reason}", file=sys.stderr, flush=True)
            self._end_worker(0.0 if ended.code else 2 * END_S)
            return ended.code
        except BaseException as stopped:
            self._board.say(gone=str(stopped) or type(stopped).__name__)
            raise
        finally:
            self._over = True
            self._end_worker(0.0)
            if self._directory:
                self._directory.release()
            self._leave()

    def take(self) -> tuple[Path, RunDir | None]:
        """For a process that is itself the worker: the run directory with the job, and this machine's hold on one of its own.

        Raises:
            WorkerFailed: rank 0 has failed, or there is no job in time.
        """
        try:
            run_dir, _ = self._get_job()
            self._wait(lambda: self._board.heard(0).get("go"), "has not begun")
        except Ended as ended:
            raise WorkerFailed(0, ended.reason or "has ended") from ended
        finally:
            self._leave()
        return run_dir, self._directory

    def _leave(self) -> None:
        self._board.say(left=True)
        self._board.flush(2.0)
        self._board.close()

    def _get_job(self) -> tuple[Path, dict[str, str]]:
        """Its run directory, which has it whole, and what a worker's environment has beside this process's."""
        job = self._wait(lambda: self._board.heard(0).get("job"), "has handed out no job")
        run_dir = Path(job["run_dir"])
        if self.place.local_rank == 0:
            self._receive(job, run_dir)
        else:
            self._board.say(sees=None)
        self._wait(lambda: holds(run_dir, job["id"], job["sizes"]) or None, f"has sent no job below {run_dir}")
        folder(run_dir / "ranks")
        return run_dir, job["env"]

    def _attend(self) -> NoReturn:
        run_dir, env = self._get_job()
        self._worker = PlaceWorker.start(self.place, run_dir, env)
        if self._directory:
            threading.Thread(target=self._send_back, args=(run_dir,), daemon=True).start()
        log = log_of(run_dir, self.place.rank)
        while True:
            self._look()
            if not log.exists():
                raise deleted(self.place.rank, log)
            if (code := self._worker.process.poll()) is not None:
                self._board.say(exit=code)
            time.sleep(POLL_S)

    def _wait_for_end(self) -> None:
        """Until rank 0 has ended with or without a word."""
        with suppress(WorkerFailed):
            while True:
                self._look()
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
        place = f"{self.place.address}:{self.place.port}"
        if not self._board.open:
            raise WorkerFailed(0, f"the store at {place} is gone: rank 0, its launcher or its machine has ended")
        if (silent_s := self._board.silent_s(0)) > LOST_S:
            raise WorkerFailed(
                0, f"rank 0 (store at {place}) gives no sign of life for {silent_s:.0f} s: killed, stopped or cut off"
            )

    def _receive(self, job: dict[str, Any], run_dir: Path) -> None:
        """See rank 0's run directory, or get the job into one of this machine's own, of the same path."""
        if holds(run_dir, job["id"], job["sizes"]):
            self._board.say(sees=True)
            return
        directory = RunDir(run_dir, field=self._setting)
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
        inbox = Inbox(Mail(self.store, f"job/{self.place.rank}"), run_dir, _JOB.fullmatch)
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
            raise error if isinstance(error, GppError) else WorkerFailed(self.place.rank, f"{run_dir} cannot be written: {error}")

    def _send_back(self, run_dir: Path) -> None:
        """Send what this machine's workers write; a worker's end only after everything that was written before it."""
        mail, sent = Mail(self.store, f"out/{self.place.rank}"), dict[str, tuple[int, int]]()

        def go_on() -> None:
            if self._over:
                raise Ended(0, None)

        with suppress(Ended, RuntimeError):
            while not self._over:
                ends = {path.relative_to(run_dir).as_posix() for path in run_dir.glob("ranks/rank_*.end.json")}
                found = [path for folder in ("checkpoints/.final", "ranks") for path in sorted((run_dir / folder).glob("*"))]
                names = [path.relative_to(run_dir).as_posix() for path in found]
                late = [name for name in names if name.endswith(".end.json")]
                for name in (*(name for name in names if name not in late), *(name for name in late if name in ends)):
                    status = (run_dir / name).stat() if OUTPUT.fullmatch(name) and not name.endswith(".new") else None
                    mark = status and (status.st_size, status.st_mtime_ns)
                    if mark is not None and (sent.get(name) != mark or name.endswith(".status")):
                        at = sent.get(name, (0, 0))[0] if name.endswith(".jsonl") else 0
                        size = send_file(mail, run_dir, name, go_on, at=at)
                        sent[name] = (size, mark[1])
                time.sleep(SEND_S)

    def _end_worker(self, patience_s: float) -> None:
        if self._worker:
            self._worker.end(patience_s)
