"""Where a worker computes, which samples of a stage's passes are its own, and which random numbers a forward draws.

A pass is seeded by what it computes and not by where: run seed, step, stage, micro-batch, replica. So dropout does not change with
device ids, ranks, launch order or the order in which a schedule interleaves micro-batches, and a pass that is run again draws the
same. Another partition is another assignment of random numbers to samples: equal in distribution only.
"""

from __future__ import annotations

import hashlib
import struct
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


def generators(device: torch.device) -> tuple[torch.Generator, ...]:
    """The generators of random numbers that a pass on a device may draw from: the processor's, and the card's own.

    To seed them draws what `torch.manual_seed` would; that also looks for every other accelerator, for 280 us a call.
    """
    if device.type != "cuda":
        return (torch.default_generator,)
    return torch.default_generator, torch.cuda.default_generators[
        torch.cuda.current_device() if device.index is None else device.index
    ]


def pass_seed(seed: int, step: int, stage: int, microbatch: int, replica: int) -> int:
    """Seed of the forward pass of a replica of a stage on a micro-batch, in 0 .. 2**63 - 1.

    Args:
        seed: the run's seed.
        step: optimizer steps done before, from 0.
        replica: number of the replica within its stage, from 0.
    """
    words = struct.pack("<5q", seed, step, stage, microbatch, replica)
    return int.from_bytes(hashlib.blake2b(words, digest_size=8).digest(), "little") >> 1
