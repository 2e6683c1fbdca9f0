"""`gpp.parallelize` with its workers as threads: the user's own call and all its checks, without starting processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from gpp.program.program import reduce_groups
from gpp.runtime.job import Job
from gpp.runtime.live.worker import LiveWorker
from gpp.runtime.worker.process import open_lines
from gpp.runtime.worker.seat import Seat
from tests.support.fake_transport import FakeNetwork, FakeTransport
from tests.support.inprocess import drawing_in_turn, in_threads

Tensors = Mapping[str, torch.Tensor]


class ThreadCrew:
    """In place of `gpp.runtime.live.crew.Crew`: the same workers on a network of this process."""

    def __init__(self, job: Job, run_dir: Path) -> None:
        (run_dir / "ranks").mkdir(parents=True, exist_ok=True)
        job, self._forms, self._run_dir, self._stack = Job.load(run_dir), 1, run_dir, ExitStack()
        network = FakeNetwork(reduce_groups(job.plan, job.graph), job.plan.num_devices, timeout_s=20.0)
        self._workers = [
            LiveWorker(job, run_dir, Seat(device_id=d, device=torch.device("cpu"), transport=FakeTransport(network, d)))
            for d in job.plan.devices
        ]
        for rank, worker in enumerate(self._workers):
            lines = self._stack.enter_context(open_lines(run_dir, rank))
            self._stack.enter_context(worker.opened(lines))
            worker._listens = False  # a process has one allocator to listen to
        self.notes = tuple(dict.fromkeys(note for worker in self._workers for note in worker.notes))

    def agree(self, batch: Tensors, constants: Mapping[str, Any]) -> None:
        """There is one program, so there is one batch."""

    def barrier(self) -> None:
        """There is nobody else to wait for."""

    def add(self, make: Callable[[], tuple[Job, Tensors]]) -> Job:
        """As of `Crew`."""
        job, weights = make()
        folder = self._run_dir / "forms" / str(self._forms)
        job.save(folder, weights)
        self._forms += 1
        in_threads([lambda w=worker: w.add(folder) for worker in self._workers])
        return job

    def follow(self, values: Sequence[Mapping[str, Any]]) -> None:
        """As of `Crew`."""
        for worker in self._workers:
            worker.follow(values)

    def ask(self, what: Any, batch: Tensors | None = None, form: int = 0) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
        """As of `Crew`."""
        numbers: dict[str, float] = {}
        tensors: dict[str, torch.Tensor] = {}
        for head, own in in_threads([lambda w=worker: w.do(what, batch or {}, form) for worker in self._workers]):
            for name, value in head.items():
                numbers[name] = numbers.get(name, 0.0) + value
            # As through a socket: a copy, which later steps leave alone.
            tensors = {name: tensor.detach().clone() for name, tensor in own.items()} | tensors
        return numbers, tensors

    def end(self) -> None:
        """As of `Crew`."""
        in_threads([worker.end for worker in self._workers])
        self.close()

    def close(self, error: BaseException | None = None) -> None:
        """As of `Crew`."""
        self._stack.close()


@contextmanager
def workers_in_threads() -> Iterator[None]:
    """While the context lasts `gpp.parallelize` starts threads, not processes."""
    with drawing_in_turn(), mock.patch("gpp.runtime.live.crew.Crew", ThreadCrew):
        yield
