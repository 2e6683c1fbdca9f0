"""The workers of a program that trains step by step: started, told what to do, watched, ended.

Each has a connection of its own: a socket of this machine in a folder that only this user can enter, with a secret that only the
workers are given. What goes through it is JSON and safetensors.
"""

from __future__ import annotations

import secrets
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, Listener, wait
from pathlib import Path
from typing import Any

import torch

from gpp.errors import WorkerFailed
from gpp.files import TemporaryFolder
from gpp.runtime.controller.controller import POLL_S, all_ended, start_workers
from gpp.runtime.hang_detection.watch import LocalWatch, watch_of
from gpp.runtime.job import Job
from gpp.runtime.live.fed import ADDRESS, SECRET, hear, tell

END_S = 5.0
"""Seconds that workers have to end after a signal."""

Tensors = Mapping[str, torch.Tensor]


class Crew:
    """The workers of a job on this machine, from their start to `end`.

    Raises:
        WorkerFailed: from any method: one died, or they stand still; the others have been stopped.
    """

    def __init__(self, job: Job, run_dir: Path) -> None:
        self._ranks, self._world, self._forms = run_dir / "ranks", job.plan.num_devices, [job]
        self._folder = TemporaryFolder("feed")  # a path in the run directory may be too long for a socket
        secret = secrets.token_bytes(32)
        self._listener = Listener(f"{self._folder.path}/socket", "AF_UNIX", backlog=self._world, authkey=secret)
        more = {ADDRESS: str(self._listener.address), SECRET: secret.hex()}
        self._context: Any = start_workers("gpp.runtime.live.worker", job, run_dir, self._world, more=more)
        self._watch = LocalWatch(watch=watch_of(job), ranks=self._ranks, pids=self._context.pids())
        self._feeds: dict[int, Connection] = {}
        self._reads: dict[int, list[str]] = {}
        self.notes: tuple[str, ...] = ()
        self._begin()

    def _begin(self) -> None:
        """Wait until all workers are ready."""

        def accept() -> None:
            while len(self._feeds) < self._world:
                feed = self._listener.accept()
                head, _ = hear(feed)
                self._feeds[head["rank"]] = feed

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(POLL_S)
            self._look()
        self._listener.close()  # all have come
        self._folder.close()
        answers = self._answers()
        self._reads = {rank: head["reads"] for rank, (head, _) in answers.items()}
        self.notes = tuple(dict.fromkeys(note for head, _ in answers.values() for note in head["notes"]))

    def agree(self, batch: Tensors, constants: Mapping[str, Any]) -> None:
        """There is one program, so there is one batch."""

    def barrier(self) -> None:
        """There is nobody else to wait for."""

    def add(self, make: Callable[[], tuple[Job, Tensors]]) -> Job:
        """Let all workers be ready for batches of another form, the next one by number; its job.

        Args:
            make: gives the job, and values of constants that its captured model lacks.
        """
        job, weights = make()
        folder = self._ranks.parent / "forms" / str(len(self._forms))
        job.save(folder, weights)
        self._forms.append(job)
        self._tell({"do": "form", "folder": str(folder)})
        self._answers()
        return job

    def follow(self, values: Sequence[Mapping[str, Any]]) -> None:
        """Let all workers take the next steps with other settings of the groups of an optimizer of torch's."""
        self._tell({"do": "follow", "values": values})
        self._answers()

    def ask(self, what: str, batch: Tensors | None = None, form: int = 0) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
        """Let all workers do `what`; returns the sums of their numbers, and the tensors of all of them.

        Args:
            batch: rows by name; each worker is sent those that it reads.
            form: of the batch.
        """
        self._watch.watch.turn(self._forms[form])
        self._tell({"do": what, "form": form}, batch)
        numbers: dict[str, float] = {}
        tensors: dict[str, torch.Tensor] = {}
        for head, own in self._answers().values():
            for name, value in head.items():
                numbers[name] = numbers.get(name, 0.0) + value
            tensors = own | tensors
        return numbers, tensors

    def _tell(self, words: Mapping[str, Any], batch: Tensors | None = None) -> None:
        for rank, feed in self._feeds.items():
            try:
                tell(feed, words, {name: batch[name] for name in self._reads[rank]} if batch else None)
            except OSError:
                self._gone()

    def _answers(self) -> dict[int, tuple[dict[str, Any], dict[str, torch.Tensor]]]:
        """One answer of each worker."""
        out: dict[int, tuple[dict[str, Any], dict[str, torch.Tensor]]] = {}
        rank_of = {feed: rank for rank, feed in self._feeds.items()}
        while len(out) < self._world:
            ready = wait([feed for feed, rank in rank_of.items() if rank not in out], POLL_S)
            for feed in ready:
                try:
                    out[rank_of[feed]] = hear(feed)  # type: ignore[index]
                except (EOFError, OSError):
                    self._gone()
            if not ready:
                self._look()
        return dict(sorted(out.items()))

    def _look(self) -> None:
        """Whether all workers live and move."""
        self._all_ended(0)
        if hang := self._watch.poll(time.monotonic()):
            self._watch.kill(hang.out)
            self.close()
            raise WorkerFailed(hang.rank, hang.reason)

    def _gone(self) -> None:
        """A worker has closed its connection: it is about to end, or has ended."""
        until = time.monotonic() + END_S
        while time.monotonic() < until:
            self._look()
            time.sleep(POLL_S)
        self.close()
        raise WorkerFailed(min(self._feeds, default=0), "closed its connection and says nothing")

    def end(self) -> None:
        """Let the workers write down what they have measured and the final weights, and wait for their end."""
        self._tell({"do": "end"})
        while not self._all_ended(POLL_S):
            self._look()
        self.close()

    def _all_ended(self, timeout_s: float) -> bool:
        try:
            return all_ended(self._context, self._ranks, timeout_s)
        except WorkerFailed:
            self.close()
            raise

    def close(self, error: BaseException | None = None) -> None:
        """Stop what still runs; no result is written."""
        self._context.close(signal.SIGTERM, timeout=END_S)
        for feed in self._feeds.values():
            feed.close()
        self._listener.close()
        self._folder.close()
