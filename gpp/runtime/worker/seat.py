"""Where a worker computes, and which samples of a stage's passes are its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from gpp.runtime.cards.card import AbstractCard
from gpp.runtime.hang_detection.status import AbstractStatus, NoStatus
from gpp.runtime.transport.channels import AbstractTransport
from gpp.runtime.worker.clock import AbstractClock, HostClock
from gpp.stage import Stage


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """The device of a worker.

    Args:
        device_id: its number in the plan.
        transport: carries messages to and from other devices.
        status: is told when the device waits for others.
        clock: says when actions begin and end.
        card: the accelerator that `device` is; None for a processor.
    """

    device_id: int
    device: torch.device
    transport: AbstractTransport
    status: AbstractStatus = field(default_factory=NoStatus)
    clock: AbstractClock = field(default_factory=HostClock)
    card: AbstractCard | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Portion:
    """The samples that a device holds of the micro-batches of a stage, in passes over one mini-batch (or evaluation) or more.

    Args:
        pieces: micro-batch of one mini-batch -> its samples [lo, hi) that the device holds.
        accumulation: micro-batches of a mini-batch; those of later ones in a pass are like these.
        stride: of them in a row the device has a part in one; it counts its own for its weights.
        num_samples: of a mini-batch.
    """

    pieces: Mapping[int, tuple[int, int]]
    accumulation: int
    stride: int
    num_samples: int

    @classmethod
    def of(cls, stage: Stage, device: int, num_samples: int) -> Portion:
        """The portion of a device of a stage."""
        leader = stage.replica_of(device)[0]
        return cls(
            pieces={p.microbatch: (p.lo, p.hi) for p in stage.pieces(num_samples) if p.device == leader},
            accumulation=-(-num_samples // stage.microbatch_size),
            stride=stage.stride,
            num_samples=num_samples,
        )

    def piece(self, microbatch: int) -> tuple[int, int] | None:
        """Samples of the pass that the device holds of a micro-batch; None: none."""
        minibatch, within = divmod(microbatch, self.accumulation)
        piece = self.pieces.get(within)
        if piece is None or not minibatch:
            return piece
        before = minibatch * self.num_samples
        return piece[0] + before, piece[1] + before
