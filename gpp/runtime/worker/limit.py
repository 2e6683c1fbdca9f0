"""A worker on a processor that may hold no more than its device has by the cluster's description.

A card refuses an allocation that is too large; main memory does not, so a plan that asks too much runs all the same. With
`engine.enforce_memory` the kernel refuses here too: RLIMIT_DATA bounds the private writable memory of the process, mappings
included (getrlimit(2), since Linux 4.7), to what the process had before it made its first weight, and the device's memory on
top. An allocation beyond it fails as on a card, and `Limit.explained` says where, of what, and what the plan had predicted.

glibc must not keep what tensors give back: large blocks are made to be mappings of their own, which go back to the kernel at
once (`mallopt`, whose own rule would raise the size up to 32 MiB). Each then has its pages cleared anew, so passes are slower
under a limit; only their memory is to be believed.
"""

from __future__ import annotations

import ctypes
import gc
import re
import resource
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, final

import torch

from gpp.capture.codec import dtype_of
from gpp.capture.stage import build_stage
from gpp.errors import Exhausted, OutOfMemory
from gpp.graph.captured import evaluate
from gpp.program.held import device_peaks
from gpp.program.kinds import KINDS
from gpp.program.steady_state import of_length
from gpp.runtime.hang_detection.status import EVALUATION, TRAINING, AbstractStatus
from gpp.runtime.job import Job, restore
from gpp.runtime.stretches import stretch_at
from gpp.runtime.worker.allocator import operator_at, raised_at

if TYPE_CHECKING:
    from gpp.runtime.worker.worker import Worker

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Parameters of mallopt (malloc.h)."""
OWN_MAPPING = 64 * 1024
"""Bytes from which on a block is a mapping of its own; a page of it is lost at most, so 6 % of the smallest."""
STACK = 1024 * 1024
"""Bytes of the stack of a thread that the worker starts; by default it is what `ulimit -s` says, 8 MiB as a rule."""
NOTED = 20 * 1024
"""Bytes that listening to the allocator takes for each captured node of a pass, until a whole step has shown it: about 20 events
of 440 bytes, and for every third the places in the code that it came from (small Transformers, convolutions)."""

_STATUS = Path("/proc/self/status")


def data_bytes() -> int:
    """Bytes of this process that RLIMIT_DATA counts."""
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmData:"))
    return int(line.split()[1]) * 1024


def why_not() -> str | None:
    """The reason why this machine cannot bound a process; None if it can."""
    try:
        data_bytes()
    except (OSError, StopIteration):
        return "this system does not say how much data a process has (VmData in /proc/self/status)"
    return None if hasattr(resource, "RLIMIT_DATA") else "this system has no RLIMIT_DATA"


def _rehearse(job: Job, device_id: int) -> None:
    """Run a forward, a backward and an update on zeros, and forget them.

    What torch and its libraries load and keep for the stages of this device is no tensor's, and not in the plan's
    reckoning: modules that come with the first optimizer, code and scratch memory for products and convolutions of these
    sizes (100 MB in all).
    """
    settings, nodes = job.settings, {node.target if node.kind == "input" else node.name: node for node in job.captured.nodes}
    for s in job.plan.stages_of_device[device_id]:
        stage = job.plan.stages[s]
        if stage.devices_per_replica > 1:
            continue  # its pass needs the other devices
        module = build_stage(job.captured, job.graph.nodes_of(stage.ops), device="cpu")
        with torch.no_grad():
            for tensor in (*module.parameters(), *module.buffers()):
                tensor.zero_()
        values = {}
        for name in (*module.inputs, *module.receives):
            shape = [evaluate(extent, stage.samples) for extent in nodes[name].shape or ()]
            values[name] = torch.zeros(shape, dtype=dtype_of(nodes[name].dtype or "float32"))
            values[name].requires_grad_(nodes[name].requires_grad and nodes[name].kind != "input")
        made = [value for value in module(stage.samples, values).values() if value.requires_grad]
        if made:
            torch.autograd.backward(made, [torch.zeros_like(value) for value in made])
    weight = torch.nn.Parameter(torch.zeros(1, 1))
    weight.sum().backward()
    restore(settings.optimizer).build([weight]).step()


def _own_mappings() -> None:
    """Let every large block be a mapping of its own; another C library than glibc has its own rules."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(M_MMAP_THRESHOLD, OWN_MAPPING)
        libc.mallopt(M_TRIM_THRESHOLD, OWN_MAPPING)


def _fill_holes() -> None:
    """Take the free memory of the heap in which a large block would find room: it counts already, whoever has it."""
    libc, before = ctypes.CDLL(None), data_bytes()
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, (ctypes.c_size_t,)
    while data_bytes() <= before and libc.malloc(OWN_MAPPING - 4096):
        pass


def _caller(error: Exception) -> str:
    """The innermost of the project's functions that an exception came through, as in `gpp.runtime.worker.mailbox.arrive`."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    names = [f"{frame.f_globals.get('__name__', '')}.{frame.f_code.co_name}" for frame in frames]
    return next(name for name in reversed(names) if name.startswith("gpp."))


@final
class Limit(AbstractStatus):
    """The bound of one worker; in place of its status, because it must know what the worker does.

    Args:
        status: where the worker's actions are written.
    """

    def __init__(self, job: Job, device_id: int, status: AbstractStatus) -> None:
        super().__init__(status)
        self._job, self._device = job, device_id
        self.num_bytes = round(job.cluster.devices[device_id].memory_bytes)
        self._at: tuple[int | None, int, int] = None, 0, 0
        self._worker: Worker | None = None
        self._bounds = self._hears = False
        _own_mappings()
        threading.stack_size(STACK)
        _rehearse(job, device_id)
        gc.collect()
        _fill_holes()
        self._base, self._noted, self._notes = data_bytes(), 0, 0

    def watch(self, worker: Worker) -> None:
        """Know the worker, which is bounded when its first step begins: it has made its weights, for which it has mapped the file
        of the whole model, and has loaded its data."""
        self._worker, worker.rows.loading, worker.memory.places = worker, self._beside, True

    def _begin(self, worker: Worker) -> None:
        """Bound the process from now on.

        Raises:
            OutOfMemory: what the worker holds before its first action is more than the device has.
        """
        stages, graph, held = self._job.plan.stages, self._job.graph, worker.memory.held_bytes
        self._noted = NOTED * max(
            sum(len(graph.ops[op].nodes) for op in stages[s].ops) for s in self._job.plan.stages_of_device[self._device]
        )
        self._base = max(self._base, data_bytes() - held)
        self._bounds = self._hears = True
        if held > self.num_bytes:
            raise OutOfMemory(self._reason("before its first action it", held))
        self._bound()

    def _bound(self, *, lifted: bool = False) -> None:
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (hard if lifted else self._base + self.num_bytes + self._noted, hard))

    @contextmanager
    def _beside(self) -> Iterator[None]:
        """Context in which what is made does not count: the data set, which is not on the device."""
        before = data_bytes()
        self._bound(lifted=True)
        yield
        self._base += data_bytes() - before
        if self._bounds:
            self._bound()

    def at(self, index: int) -> None:
        super().at(index)
        self._at = self._at[0], self._at[1], index
        if not self._hears or not self._worker:
            return
        memory, before = self._worker.memory, data_bytes()
        self._hears = memory.drain()
        if self._hears:
            after = data_bytes()
            self._notes = max(self._notes, before - after)
            # What the process has beside tensors has grown with the worker's own lists, messages and threads.
            self._base = max(self._base, after - memory.held_bytes)
            if self._at[1] > self._job.settings.first_step:
                self._noted = self._notes
        else:
            # Nothing is noted any more.
            self._noted = 0
        self._bound()

    def begin(self, phase: int, step: int) -> None:
        self._at = phase, step, 0
        if self._worker and not self._bounds:
            self._begin(self._worker)
        super().begin(phase, step)

    def enter(self, phase: int) -> None:
        self._at = None, *self._at[1:]
        super().enter(phase)

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Context in which an allocation that fails is told of as an end of the device's memory.

        Raises:
            OutOfMemory: says where, how much was asked for and held, and what the plan had predicted.
        """
        try:
            yield
        except Exception as error:
            self._bound(lifted=True)
            if isinstance(error, OutOfMemory) or Exhausted.of(error) is None:
                raise
            raise OutOfMemory(self._said(error)) from error

    def _said(self, error: Exception) -> str:
        """The words for what was done when an allocation failed, and for what the device held."""
        heard = self._worker.memory.last if self._worker and self._hears else None
        stage, doing = self._doing()
        where = self._operator(stage, raised_at(error.__traceback__) or (heard.place if heard else None))
        asked = re.search(r"tried to allocate (\d+) bytes", str(error))
        words = f"{doing}, {f'at {where}' if where else f'beside its operators ({_caller(error)})'},"
        words += f" it asked for {int(asked[1]):,} bytes and" if asked else f" it asked for more ({error}) and"
        return self._reason(words, heard.held_bytes if heard else data_bytes() - self._base, stage)

    def _reason(self, words: str, held: int, stage: int | None = None) -> str:
        job = self._job
        planned = device_peaks(job.program, job.costs)[self._device]
        b = job.plan.stages[job.plan.stages_of_device[self._device][0] if stage is None else stage].microbatch_size
        return (
            f"device {self._device} is out of memory: {words} held {held:,} of the {self.num_bytes:,} that engine.enforce_memory "
            f"leaves it, and the plan says that it needs {round(planned):,}. Fix: use a microbatch_size below {b}, more devices, "
            "or devices with more memory (cluster.memory_bytes)"
        )

    def _operator(self, stage: int | None, place: tuple[str, int] | None) -> str | None:
        """The user's operator at a place in a stage's code, as in `towers.0.up (aten.linear.default)`."""
        if stage is None or place is None:
            return None
        ops = [self._job.graph.ops[op] for op in self._job.plan.stages[stage].ops]
        node = operator_at(self._job.captured, [name for op in ops for name in op.nodes], place)
        if node is None:
            return None
        # What a model's own forward calls is in no module below it; its operator has a name all the same.
        return f"{node.module or next((op.name for op in ops if node.name in op.nodes), node.name)} ({node.target})"

    def _doing(self) -> tuple[int | None, str]:
        """The stage whose action failed, if there is one, and that action in words."""
        job, (phase, step, index) = self._job, self._at
        program = job.program if phase == TRAINING else job.evaluation if phase == EVALUATION else None
        if phase == TRAINING and job.streams:
            actions = of_length(job.program, job.plan, self._device, stretch_at(job, step)[1])
        else:
            actions = iter(program.actions[self._device] if program else ())
        action = next(islice(actions, index, None), None)
        if action is None:
            return None, "beside its actions"
        kind = KINDS[action.kind]
        when = f"in the evaluation after step {step}" if phase == EVALUATION else f"in step {step}"
        return action.stage, f"in {action.text(self._device)} ({kind.meaning}) {when}"
