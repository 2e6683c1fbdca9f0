"""Trainings that take over other plans: the real workers in threads, and the same training through a checkpoint on disk."""

from __future__ import annotations

import json
import queue
import threading
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import torch

from gpp.program.program import reduce_groups
from gpp.runtime.job import Job
from gpp.runtime.transport.channels import AbstractTransport
from gpp.runtime.worker.announced import announce
from gpp.runtime.worker.main import course
from gpp.runtime.worker.takeover import AbstractExchange, Takeover
from tests.support.fake_transport import FakeNetwork, FakeTransport
from tests.support.inprocess import drawing_in_turn, in_threads, workers_of

Trained = tuple[dict[int, float], dict[str, torch.Tensor], list[dict[str, Any]]]
"""Step -> loss; final parameters and buffers; the lines of the switches."""


class Meeting:
    """What the exchanges of one training share."""

    def __init__(self, devices: Sequence[int]) -> None:
        self.first, self.barrier, self.said = min(devices), threading.Barrier(len(devices)), False
        self.queues: dict[tuple[int, int], queue.Queue[torch.Tensor]] = defaultdict(queue.Queue)
        self.lock, self.networks = threading.Lock(), dict[int, FakeNetwork]()


class FakeExchange(AbstractExchange):
    """The contract inside one process."""

    def __init__(self, meeting: Meeting, device: int) -> None:
        self._meeting, self._device = meeting, device

    def agree(self, own: bool) -> bool:
        if self._device == self._meeting.first:
            self._meeting.said = own
        self._meeting.barrier.wait(60)
        found = self._meeting.said
        self._meeting.barrier.wait(60)
        return found

    def send(self, device: int, message: torch.Tensor) -> None:
        with self._meeting.lock:
            self._meeting.queues[self._device, device].put(message.clone())

    def receive(self, device: int) -> torch.Tensor:
        with self._meeting.lock:
            found = self._meeting.queues[device, self._device]
        return found.get(timeout=60)

    def transport(self, job: Job, device: int) -> AbstractTransport:
        with self._meeting.lock:
            groups = reduce_groups(job.plan, job.graph)
            network = self._meeting.networks.setdefault(job.settings.first_step, FakeNetwork(groups, job.plan.num_devices))
        return FakeTransport(network, device)


def train(job: Job, run_dir: Path, weights: dict[str, torch.Tensor], nexts: Sequence[Job] = ()) -> Trained:
    """Run a job to its end; the plans of `nexts` are taken one after the other, each at the first boundary that comes."""
    job.save(run_dir, weights)
    (run_dir / "ranks").mkdir(exist_ok=True)
    for number, later in enumerate(nexts):
        announce(run_dir, number, later)
    workers, outs = workers_of(job, run_dir), [StringIO() for _ in job.plan.devices]
    meeting = Meeting(job.plan.devices)
    takeovers = [Takeover(FakeExchange(meeting, worker.device_id)) if job.settings.replan_every else None for worker in workers]
    calls = zip(workers, outs, takeovers, strict=True)
    with drawing_in_turn():
        ended = in_threads([lambda w=w, out=out, takeover=takeover: course(w, out, takeover) for w, out, takeover in calls])
    losses: dict[int, float] = defaultdict(float)
    switches = list[dict[str, Any]]()
    for record in (json.loads(line) for out in outs for line in out.getvalue().splitlines()):
        switches += [record] if "switched" in record else []
        if "step" in record and "switched" not in record:
            losses[record["step"]] += sum(value for name, value in record.items() if name.startswith("loss"))
    state: dict[str, torch.Tensor] = {}
    for worker in reversed(ended):
        for module in worker.modules.values():
            state.update(module.state_dict())
    return dict(losses), state, switches


def through_checkpoints(jobs: Sequence[Job], folder: Path, weights: dict[str, torch.Tensor]) -> Trained:
    """The same training by way of checkpoints on disk: a run for each plan, which goes on from the last one's checkpoint."""
    every, losses, state = jobs[0].settings.replan_every, dict[int, float](), dict[str, torch.Tensor]()
    for number, job in enumerate(jobs):
        run_dir, first = folder / str(number), number * every
        run_dir.mkdir(parents=True)
        saved = folder / str(number - 1) / "checkpoints" / f"step_{first}"
        more = {"checkpoint_every": every, "checkpoint_keep": 100, "checkpoint_drain": True}
        goes_on = {"resume": str(saved), "first_step": first} if number else {}
        found, state, _ = train(replace(job, settings=replace(job.settings, **more, **goes_on)), run_dir, weights)
        losses |= found
    return losses, state, []


def bits(tensor: torch.Tensor) -> bytes:
    """What two tensors have in common that are equal bit for bit, whatever their values."""
    return tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def differences(first: Trained, second: Trained) -> list[str]:
    """What is not equal bit for bit."""
    found = [f"loss of step {step}" for step in first[0] | second[0] if first[0].get(step) != second[0].get(step)]
    names = sorted(first[1].keys() | second[1].keys())
    return found + [n for n in names if n not in first[1] or n not in second[1] or bits(first[1][n]) != bits(second[1][n])]
