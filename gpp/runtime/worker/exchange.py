"""The exchange of workers between two plans: a decision that all take alike, and tensors from any to any other."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import final

import torch
import torch.distributed as dist

from gpp.runtime.job import Job
from gpp.runtime.transport.channels import AbstractTransport
from gpp.runtime.worker.process import transport_of


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
        return transport_of(job, device=device, rank_of=self._rank_of, card=None)
