"""The CPU allocator's own account of a worker's peak memory.

CUDA's allocator keeps a peak. PyTorch's CPU allocator keeps none, but it tells a profiler of every block that it hands
out and takes back. Those events are recorded while `MemoryEvents` is open: a few microseconds an operator, so a worker
listens in its first steps, which are not timed, and never again. An event may have been heard inside a stage's generated code:
`operator_at` names the user's operator there.
"""

from __future__ import annotations

import linecache
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from difflib import SequenceMatcher
from traceback import walk_tb
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch._C._autograd import _disable_profiler_legacy, _enable_profiler_legacy
from torch._C._profiler import ProfilerConfig, ProfilerState, _ExperimentalConfig

from gpp.graph.captured import Captured, Node

if TYPE_CHECKING:
    from gpp.runtime.worker.around import AbstractStageWeights


GENERATED = "<eval_with_key>"
"""What the names of files of generated code begin with (`torch.fx`)."""

_PLACE = re.compile(rf"({re.escape(GENERATED)}[^(]*)\((\d+)\)")
_CALL = re.compile(r"= ([\w.]+)\(")


def place_of(frames: Sequence[str]) -> tuple[str, int] | None:
    """File and line of the innermost generated code among the profiler's frames; None where there is none."""
    found = next((match for match in map(_PLACE.match, frames) if match), None)
    return (found[1].strip(), int(found[2])) if found else None


def raised_at(trace: TracebackType | None) -> tuple[str, int] | None:
    """File and line of the innermost generated code that an exception came through; None where there is none."""
    frames = ((frame.f_code.co_filename, line) for frame, line in walk_tb(trace))
    return next((place for place in reversed([*frames]) if place[0].startswith(GENERATED)), None)


def operator_at(captured: Captured, nodes: Iterable[str], place: tuple[str, int]) -> Node | None:
    """The node that a line of generated code runs; None where it runs none.

    The code calls the stage's nodes in their order, one a line, with lines of other calls between them. So lines and nodes are
    matched as two sequences of the operators' names.

    Args:
        nodes: the nodes of the stage.
        place: file and line.
    """
    file, number = place
    own = set(nodes)
    made = [node for node in captured.nodes if node.kind == "call" and (node.free or node.name in own)]
    lines = {at: _name(match[1]) for at, line in enumerate(linecache.getlines(file), start=1) if (match := _CALL.search(line))}
    places = list(lines)
    if number not in lines:
        return None
    matcher = SequenceMatcher(None, [lines[at] for at in places], [_name(node.target) for node in made], autojunk=False)
    for begin, first, count in matcher.get_matching_blocks():
        offset = places.index(number) - begin
        if 0 <= offset < count:
            return made[first + offset]
    return None


def _name(path: str) -> str:
    """An operator's name, without its namespace and its overload: `linear` of `torch._C._nn.linear` and `aten.linear.default`."""
    parts = path.removeprefix("torch.ops.").split(".")
    return parts[-1] if parts[0] == "torch" else parts[1] if len(parts) > 1 else parts[0]


_ALLOCATION = "memory_alloc"
"""Kind of the events of the allocator: bytes handed out, below zero where they are taken back."""
_BEGINS = "push"
"""Kind of the events of operators that begin."""
_DIFFERENTIATED = 1
"""Scope of those that autograd runs for an operator of the forward (`RecordScope::BACKWARD_FUNCTION`)."""
_BACKWARD = ": _engine_run_backward"
"""What of a backward is on the stack of all else that runs in it."""


class Heard(NamedTuple):
    """The last events before an allocation that failed.

    Args:
        held_bytes: of the tensors that there were.
        place: file and line of the generated code of the operator that began last; in a backward, of the operator of the forward
            that it differentiates; None if neither is in generated code.
    """

    held_bytes: int
    place: tuple[str, int] | None


class MemoryEvents:
    """Bytes of this thread's tensors, those that exist when it begins to listen included.

    The profiler of one thread is used: `torch.profiler` has one for the whole process, and workers may be threads. Memory
    that is no tensor's (the interpreter's, a library's own scratch, shared memory) is not the allocator's.

    Args:
        lend: told whether messages may stay in memory that is not the allocator's.

    `peak_bytes` is the most at a time up to `end`, as long as no block is taken back that was there before; `held_bytes` are
    those at the last `drain`, and `last` is what was heard last where
    `places` is set: then it hears where in the code each operator is called.
    """

    def __init__(self, lend: Callable[[bool], None]) -> None:
        self.peak_bytes = self.held_bytes = 0
        self.last: Heard | None = None
        self.places = False
        self._lend, self._listens = lend, False
        self._made_at: dict[int, tuple[str, int]] = {}
        """Autograd's number of an operator -> where it was called."""

    def begin(self, held: Iterable[torch.Tensor]) -> None:
        """Listen to this thread's allocations from now on.

        Args:
            held: the tensors that exist already and stay.
        """
        self.peak_bytes = self.held_bytes = storage_bytes(held)
        self._lend(False)
        self._listen()

    def _listen(self) -> None:
        # One line each: state, shapes, memory, stack, FLOPs, modules, and further settings.
        _enable_profiler_legacy(ProfilerConfig(ProfilerState.CPU, False, True, self.places, False, False, _ExperimentalConfig()))
        self._listens = True

    def drain(self) -> bool:
        """Sum up what was heard and go on, so that the notes do not pile up; returns whether it listens."""
        if self._listens:
            self._sum_up()
            self._listen()
        return self._listens

    def end(self) -> None:
        """Sum up what was heard; nothing where it does not listen."""
        if self._listens:
            self._sum_up()
            self._lend(True)

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Ignore memory events that belong to no step: those of an evaluation, or the copy that a checkpoint is written from."""
        listened = self._listens
        if listened:
            self._sum_up()
        try:
            yield
        finally:
            if listened:
                self._listen()

    def _sum_up(self) -> None:
        self._listens = False
        events: list[list[Any]] = _disable_profiler_legacy()
        for event in (event for thread in events for event in thread):
            kind = event.kind()
            if kind == _ALLOCATION:
                change = event.cpu_memory_usage()
                self.held_bytes += change
                self.peak_bytes = max(self.peak_bytes, self.held_bytes)
                if self.places and change > 0 and self.last:
                    self.last = Heard(self.held_bytes, self.last.place)
            elif self.places and kind == _BEGINS:
                self._note(event)

    def _note(self, event: Any) -> None:
        """Note that an operator begins."""
        number, frames = event.sequence_nr(), event.stack()
        place, backward = place_of(frames), any(frame.endswith(_BACKWARD) for frame in frames)
        if int(event.scope()) == _DIFFERENTIATED:
            # A sum into a gradient has no number, and goes with what made it.
            place = self._made_at.get(number)
        elif place and number >= 0:
            self._made_at[number] = place
        self.last = Heard(self.held_bytes, place or (self.last.place if self.last and (backward or not frames) else None))


def held_by(
    modules: Iterable[torch.nn.Module], optimizers: Iterable[torch.optim.Optimizer], weights: Iterable[AbstractStageWeights]
) -> Iterator[torch.Tensor]:
    """The tensors of a worker beside micro-batches: weights, buffers, gradients, optimizer's state, copies of the weights."""
    for module in modules:
        yield from (*module.parameters(), *module.buffers())
        yield from (param.grad for param in module.parameters() if param.grad is not None)
    yield from states(optimizers)
    for own in weights:
        yield from own.held()


def states(optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[torch.Tensor]:
    """Tensors of the optimizers' state."""
    for optimizer in optimizers:
        yield from (tensor for entry in optimizer.state.values() for tensor in entry.values() if isinstance(tensor, torch.Tensor))


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the memory behind some tensors, each storage once."""
    storages = {storage._cdata: storage for storage in (tensor.untyped_storage() for tensor in tensors)}
    return sum(storage.nbytes() for storage in storages.values())
