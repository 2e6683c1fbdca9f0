"""The seeding rule: which random numbers a forward pass draws.

A pass is seeded by what it computes and not by where: run seed, step, stage, micro-batch, replica. So dropout does not
change with device ids, ranks, launch order or the order in which a schedule interleaves micro-batches, and a pass that
is run again draws the same. Another partition is another assignment of random numbers to samples: equal in distribution
only.
"""

from __future__ import annotations

import hashlib
import struct

import torch


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
