"""The way from one plan to the next between two steps, in the same process: the controller announces, layers change workers.

All workers take the first rank's word for whether there is a next plan. Each reads its job, which is proved to fit together as at
the start of a run. The tensors that a device lacks come from the device that would have saved them in a checkpoint
(`gpp.runtime.checkpoint.moves`); the rest it has. A new `Worker` is made of them, as one that goes on from a checkpoint is.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, final

import torch
import torch.distributed as dist
from safetensors.torch import load, save

from gpp.runtime.checkpoint.moves import moves
from gpp.runtime.hang_detection.status import MEETING, STARTING
from gpp.runtime.job import Job
from gpp.runtime.transport.channels import AbstractTransport
from gpp.runtime.worker.announced import announced
from gpp.runtime.worker.process import transport_of
from gpp.runtime.worker.worker import Worker


class AbstractExchange(ABC):
    """One worker's part; all make the same calls between two steps, while no message of a program is under way."""

    @abstractmethod
    def agree(self, own: bool) -> bool:
        """The value of the first rank, on every rank."""

    @abstractmethod
    def send(self, device: int, message: torch.Tensor) -> None:
        """Send bytes ([length], uint8) to a device, which takes them now."""

    @abstractmethod
    def receive(self, device: int) -> torch.Tensor:
        """The bytes that a device sends now: [length], uint8."""

    @abstractmethod
    def transport(self, job: Job, device: int) -> AbstractTransport:
        """The transport of the next plan; all workers make theirs together, on the devices that they have."""


@final
class TorchExchange(AbstractExchange):
    """The exchange over the process group of all ranks, with gloo.

    Args:
        job: under any of the plans, which all use the same devices.
    """

    def __init__(self, job: Job) -> None:
        self._rank_of = {device: rank for rank, device in enumerate(job.plan.devices)}

    def agree(self, own: bool) -> bool:
        found = torch.tensor([own and dist.get_rank() == 0], dtype=torch.int64)
        dist.all_reduce(found)
        return bool(found.item())

    def send(self, device: int, message: torch.Tensor) -> None:
        dist.send(torch.tensor([message.numel()], dtype=torch.int64), self._rank_of[device])
        dist.send(message, self._rank_of[device])

    def receive(self, device: int) -> torch.Tensor:
        length = torch.empty(1, dtype=torch.int64)
        dist.recv(length, self._rank_of[device])
        message = torch.empty(int(length.item()), dtype=torch.uint8)
        dist.recv(message, self._rank_of[device])
        return message

    def transport(self, job: Job, device: int) -> AbstractTransport:
        return transport_of(job, device, None)


@final
class Takeover:
    """A worker's way from plan to plan.

    Args:
        exchange: with the other workers.
    """

    def __init__(self, exchange: AbstractExchange) -> None:
        self._exchange, self._number = exchange, 0

    def after(self, worker: Worker, done: int) -> tuple[Worker, Mapping[str, Any]] | None:
        """The worker that goes on after `done` steps, and the line that says what it took; None where no plan is announced.

        Raises:
            InvalidFile, MalformedProgram: the job of the next plan cannot be read, or does not fit together.
        """
        folder = announced(worker.run_dir, self._number)
        worker.status.enter(MEETING)
        worker.status.waiting(True)
        if not self._exchange.agree(folder.is_dir()):
            return None
        worker.status.enter(STARTING)
        start = time.perf_counter()
        worker.memory.end()
        worker.checkpoints.wait()
        job = Job.load(folder)
        job = replace(job, settings=replace(job.settings, first_step=done, resume=None))
        state, received = carried(worker, job, self._exchange)
        rows, run_dir, seat = worker.rows, worker.run_dir, worker.seat
        rows.forget()  # an order of samples asks the worker that it was made by
        seat.transport.close()
        vars(worker).clear()  # whoever began with it may hold it to the end of the run: not its weights, too
        seat = replace(seat, transport=self._exchange.transport(job, seat.device_id))
        later = Worker(job, run_dir, seat, rows=lambda settings, device, card: rows, state=state)
        self._number += 1
        return later, {"switched": self._number - 1, "step": done, "start": start, "bytes": received}


def carried(worker: Worker, job: Job, exchange: AbstractExchange) -> tuple[dict[str, torch.Tensor], int]:
    """The tensors with which a device begins the next plan, by the names of a checkpoint, and the bytes that others have sent."""
    state, received = {key: tensor for key, _, tensor in worker.checkpoints.held()}, 0
    for move in moves(worker.job, job):
        # In one order on all devices, each message taken before the next: so no two wait for each other.
        if move.source == worker.device_id:
            own = {key: tensor.cpu().contiguous() for key, _, tensor in worker.checkpoints.held({move.name}, state=move.state)}
            exchange.send(move.destination, torch.frombuffer(bytearray(save(own)), dtype=torch.uint8))
        elif move.destination == worker.device_id:
            message = exchange.receive(move.source)
            received += message.numel()
            state.update(load(message.numpy().tobytes()))
    return state, received
