"""Peak memory where the allocator keeps no statistics."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass(slots=True)
class MemoryMeter:
    """Bytes of the tensors that micro-batches in flight hold, by storage (the CPU has no allocator statistics).

    Args:
        own: addresses of memory that is not theirs.
        copies: the same of the versions of its weights that a stage holds at the moment.
    """

    own: set[int]
    copies: dict[int, set[int]] = field(default_factory=dict)
    held: dict[tuple[int, int], dict[int, int]] = field(default_factory=dict)
    peak_bytes: int = 0

    def note(self, stage: int, microbatch: int, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address not in self.own and not any(address in copies for copies in self.copies.values()):
            self.held.setdefault((stage, microbatch), {})[address] = storage.nbytes()
        return tensor

    def update(self) -> None:
        merged: dict[int, int] = {}
        for held in self.held.values():
            merged.update(held)
        self.peak_bytes = max(self.peak_bytes, sum(merged.values()))

    def release(self, stage: int, microbatch: int) -> None:
        self.held.pop((stage, microbatch), None)
