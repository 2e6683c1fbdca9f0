"""The CPU allocator's own account of a worker's peak memory.

CUDA's allocator keeps a peak. PyTorch's CPU allocator keeps none, but it tells a profiler of every block that it hands
out and takes back. Those events are recorded while `MemoryEvents` is open: a few microseconds an operator, so a worker
listens in its first steps, which are not timed, and never again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch._C._autograd import _disable_profiler_legacy, _enable_profiler_legacy
from torch._C._profiler import ProfilerConfig, ProfilerState, _ExperimentalConfig

if TYPE_CHECKING:
    from gpp.runtime.worker.weights.base import AbstractStageWeights

_ALLOCATION = "memory_alloc"
"""Kind of the events of the allocator: bytes handed out, below zero where they are taken back."""


class MemoryEvents:
    """Bytes of this thread's tensors, those that exist when it begins to listen included.

    The profiler of one thread is used: `torch.profiler` has one for the whole process, and workers may be threads. Memory
    that is no tensor's (the interpreter's, a library's own scratch, shared memory) is not the allocator's.

    Args:
        lend: told whether messages may stay in memory that is not the allocator's.

    `peak_bytes` is the most at a time up to `end`, as long as no block is taken back that was there before.
    """

    def __init__(self, lend: Callable[[bool], None]) -> None:
        self.peak_bytes = 0
        self._lend, self._listens = lend, False

    def begin(self, held: Iterable[torch.Tensor]) -> None:
        """Listen to this thread from now on.

        Args:
            held: the tensors that exist already and stay.
        """
        self.peak_bytes = storage_bytes(held)
        self._lend(False)
        # One line each: state, shapes, memory, stack, FLOPs, modules, and further settings.
        _enable_profiler_legacy(ProfilerConfig(ProfilerState.CPU, False, True, False, False, False, _ExperimentalConfig()))
        self._listens = True

    def end(self) -> None:
        """Sum up what was heard; nothing where it does not listen."""
        if not self._listens:
            return
        self._listens = False
        self._lend(True)
        events: list[list[Any]] = _disable_profiler_legacy()
        changes = (event.cpu_memory_usage() for thread in events for event in thread if event.kind() == _ALLOCATION)
        self.peak_bytes += max(accumulate(changes, initial=0))


def held_by(
    modules: Iterable[torch.nn.Module], optimizers: Iterable[torch.optim.Optimizer], weights: Iterable[AbstractStageWeights]
) -> Iterator[torch.Tensor]:
    """What a worker holds beside micro-batches: weights, buffers, gradients, optimizer's state, copies of the weights."""
    for module in modules:
        yield from (*module.parameters(), *module.buffers())
        yield from (param.grad for param in module.parameters() if param.grad is not None)
    yield from states(optimizers)
    for own in weights:
        yield from (tensor for copy in (own.own, *own.scratch()) for tensor in copy)


def states(optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[torch.Tensor]:
    """Tensors of the optimizers' state."""
    for optimizer in optimizers:
        yield from (tensor for entry in optimizer.state.values() for tensor in entry.values() if isinstance(tensor, torch.Tensor))


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the memory behind some tensors, each storage once."""
    storages = {storage._cdata: storage for storage in (tensor.untyped_storage() for tensor in tensors)}
    return sum(storage.nbytes() for storage in storages.values())
