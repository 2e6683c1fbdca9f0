"""The common part of all baselines' workers, whatever engine moves the tensors.

Data, learning rate, clock, events, memory, evaluations, records and final weights are here; the engine's own part
is an `AbstractShare`.
"""

from __future__ import annotations

import json
import math
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import torch

from gpp.errors import NonFinite
from gpp.files import write_text
from gpp.graph.captured import is_loss
from gpp.runtime.checkpoint.checkpoint import Checkpointer
from gpp.runtime.checkpoint.final import save_final
from gpp.runtime.checkpoint.moves import owned_names
from gpp.runtime.job import Job, restore
from gpp.runtime.nonfinite import PassPlace, Seen, nonfinite, shown, told
from gpp.runtime.worker.allocator import MemoryEvents, states
from gpp.runtime.worker.process import KEPT_STEPS, write_line
from gpp.runtime.worker.rows import minibatch_indices
from gpp.runtime.worker.stage import Fetch
from gpp.timeline import Event

if TYPE_CHECKING:
    from gpp.data.base import Samples


class Harness:
    """One rank's access to the job.

    Args:
        rank: rank of this worker.
        device_id: device of the plan that this worker stands for.
        device: the torch device.
    """

    def __init__(self, job: Job, run_dir: Path, *, rank: int, device_id: int, device: torch.device) -> None:
        self.job, self.run_dir, self.rank, self.device_id, self.device = job, run_dir, rank, device_id, device
        settings = job.settings
        self.model = restore(settings.model) if settings.model else None
        self.data = restore(settings.data)
        self.optimizer = restore(settings.optimizer)
        self.step = 0
        self.events: list[Event] = []
        self._out: TextIO | None = None
        self._told = False
        self._samples: dict[str, Samples] = {}

    def order(self) -> torch.Tensor:
        """The samples of the current step, in the order in which every engine sees them."""
        settings = self.job.settings
        return minibatch_indices(self.step, settings.minibatch_size, settings.train_samples, settings.seed)

    def fetch(
        self, split: str, indices: Sequence[int] | torch.Tensor, names: Collection[str] | None = None
    ) -> dict[str, torch.Tensor]:
        """The named inputs and targets (None: all) of some samples of a split, on the worker's device."""
        if names is not None and not names:
            return {}
        found = self._loaded(split).fetch(indices, names)
        return found if self.device.type == "cpu" else {k: v.to(self.device, non_blocking=True) for k, v in found.items()}

    def _loaded(self, split: str) -> Samples:
        if split not in self._samples:
            # Only ranks that read user inputs load data, and only the splits that they use.
            settings = self.job.settings
            self._samples[split] = self.data.load(split, self.model, seed=settings.seed, dtype=settings.dtype)
        return self._samples[split]

    def rows(self, split: str, indices: Sequence[int] | torch.Tensor, names: Collection[str] | None = None) -> Fetch:
        """A function (lo, hi) -> named tensors of samples `indices[lo:hi]`; rows in memory are fetched at once."""
        if (names is not None and not names) or not self._loaded(split).in_memory:
            return lambda lo, hi: self.fetch(split, indices[lo:hi], names)
        whole = self.fetch(split, indices, names)
        return lambda lo, hi: {name: tensor[lo:hi] for name, tensor in whole.items()}

    def set_rate(self, optimizer: torch.optim.Optimizer) -> None:
        """Give the optimizer the learning rate of the current step."""
        rate = self.optimizer.lr * self.optimizer.learning_rate.factor(self.step, self.job.settings.steps)
        for group in optimizer.param_groups:
            group["lr"] = rate

    def sync(self) -> None:
        """Wait for the accelerator, so that an event's end is the end of its kernels."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    @contextmanager
    def timed(self, kind: str, stage: int, microbatch: int, num_bytes: int = 0) -> Iterator[None]:
        """Record the block inside as an event."""
        start = time.perf_counter()
        yield
        self.sync()
        self.events.append(Event(self.device_id, kind, stage, microbatch, start, time.perf_counter(), num_bytes))

    def check_loss(self, stage: int, microbatch: int, terms: Mapping[str, float | torch.Tensor]) -> None:
        """Look at the loss terms of a micro-batch; where their values began is not known here.

        Raises:
            NonFinite: one is not finite, and the run is to stop then.
        """
        for name, value in terms.items():
            number = value.item() if isinstance(value, torch.Tensor) else value
            if not math.isfinite(number):
                place = PassPlace(step=self.step, sample=0, end=0, microbatch=microbatch)
                self._end(told(Seen(name=name, value=number, stage=stage, place=place), ()))

    def _end(self, text: str) -> None:
        if self.job.settings.on_nonfinite == "stop":
            raise NonFinite(f"{text}; engine=reference looks for it")
        if not self._told and self._out is not None:
            self._told = True
            write_line(self._out, {"warning": text})

    def run(self, share: AbstractShare) -> None:
        """Run the job: every step, every evaluation, the final weights; one JSON line each in ranks/rank_N.jsonl.

        Raises:
            NonFinite: a loss or the final weights are not finite, and the run is to stop then.
        """
        settings = self.job.settings
        ranks = self.run_dir / "ranks"
        memory = MemoryEvents(lambda lends: None)
        kept: deque[dict[str, Any]] = deque(maxlen=KEPT_STEPS)
        checkpoints = Checkpointer(
            self.job,
            self.run_dir,
            rank=self.rank,
            world=len(self.job.plan.stage_of_device),
            weights=share.named(),
            optimizers=share.optimizers(),
            owned=owned_names(self.job, self.device_id, share.named()),
        )
        checkpoints.restore()
        # However the steps end: a thread's later profilers must not find this one at work.
        with open(ranks / f"rank_{self.rank}.jsonl", "w") as out, ExitStack() as stack:
            stack.callback(memory.end)
            self._out = out
            for step in range(settings.first_step, settings.steps):
                self.step, self.events = step, []
                if step == settings.first_step and self.device.type == "cpu":
                    memory.begin([*share.tensors(), *states(share.optimizers())])
                start = time.perf_counter()
                losses = share.train_step()
                self.sync()
                end = time.perf_counter()
                kept.append({"step": step, "start": start, "end": end, "events": self.events})
                values = {name: float(value) for name, value in losses.items()}
                write_line(out, {"step": step, "start": start, "end": end, **values})
                done = step + 1
                evaluates = settings.evaluation_samples and (
                    done == settings.steps or (settings.evaluate_every and done % settings.evaluate_every == 0)
                )
                # The first two steps are not timed, and the second has the optimizer's state.
                if step > settings.first_step:
                    memory.end()
                if evaluates:
                    with torch.no_grad(), memory.apart():
                        found = share.evaluate()
                    write_line(out, {"evaluated": done, **found})
                    if lost := [name for name, value in found.items() if is_loss(name) and not math.isfinite(value)]:
                        self._end(f"{lost[0]} of the evaluation after {done} steps is not finite ({found[lost[0]]})")
                if checkpoints.due(done):
                    with memory.apart():
                        checkpoints.save(done)
            checkpoints.wait()
            trained = {name: tensor for name, tensor in share.named().items() if tensor.requires_grad}
            if lost := nonfinite(trained):
                self._end(f"the weights {shown(lost)} are not finite after the last step, number {self.step}")
        on_cpu = self.device.type == "cpu"
        peak = memory.peak_bytes + share.buffer_bytes() if on_cpu else torch.cuda.max_memory_allocated(self.device)
        result = {"device": self.device_id, "peak_memory_bytes": peak, "steps": list(kept)}
        write_text(ranks / f"device_{self.device_id}.json", json.dumps(result), exact=True)
        if settings.final_weights:
            for stage, state in share.final_state().items():
                save_final(self.run_dir, stage, state)


class AbstractShare(ABC):
    """The part of the model that one worker of an engine trains and evaluates."""

    @abstractmethod
    def tensors(self) -> list[torch.Tensor]:
        """Parameters and buffers that the worker holds."""

    @abstractmethod
    def named(self) -> dict[str, torch.Tensor]:
        """The same tensors by their full names in the captured model."""

    @abstractmethod
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Optimizers whose state the worker holds; none where nothing is trained."""

    def buffer_bytes(self) -> int:
        """Bytes of buffers that the engine has before its first step and keeps; those made in it are seen by the allocator."""
        return 0

    @abstractmethod
    def train_step(self) -> Mapping[str, float | torch.Tensor]:
        """Run one optimizer step, `harness.step`; returns this rank's share of each mean loss, by result name."""

    @abstractmethod
    def evaluate(self) -> dict[str, float]:
        """This rank's share of the mean of loss and metrics on the held-out samples; called without gradients."""

    @abstractmethod
    def final_state(self) -> dict[int, dict[str, torch.Tensor]]:
        """Stage -> trained tensors by full name, for the stages that this rank saves."""
