"""A worker that trains when it is told to: a step, an evaluation, its weights, the end; and its process.

Its program is `gpp.runtime.live.crew`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any, Literal, NamedTuple, TextIO

import torch

from gpp.capture.stage import StageModule
from gpp.graph.captured import is_loss
from gpp.runtime.hang_detection.status import CHECKPOINT, SILENT
from gpp.runtime.job import Job
from gpp.runtime.live.fed import ADDRESS, SECRET, Fed, hear, tell
from gpp.runtime.torch_optimizer import TorchOptimizer
from gpp.runtime.worker.build import all_ring_sizes, build_beside
from gpp.runtime.worker.hooks import Hooks, build_hooks
from gpp.runtime.worker.interpreter import Interpreter
from gpp.runtime.worker.main import working
from gpp.runtime.worker.process import Lines, guarded, open_lines
from gpp.runtime.worker.stage import StageRunner
from gpp.runtime.worker.worker import Worker

Do = Literal["step", "evaluate", "weights"]
Answer = tuple[Mapping[str, Any], Mapping[str, torch.Tensor]]


class Turn(NamedTuple):
    """What a worker exchanges when the form of the batches changes (`gpp.app.forms`)."""

    job: Job
    modules: Mapping[int, StageModule]
    hooks: tuple[Hooks, ...]
    training: Interpreter[StageRunner]
    evaluation: Interpreter[StageRunner] | None


class LiveWorker(Worker):
    """A device's share of a training whose steps come one by one."""

    rows: Fed

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs, rows=Fed)
        self._rooms = all_ring_sizes(self.job, self.device_id, self.training, self.evaluation)
        self._turns = [Turn(self.job, self.modules, self._hooks, self.training, self.evaluation)]
        self._at, self._stop = 0, self.job.settings.first_step

    def add(self, folder: Path) -> None:
        """Be ready for batches of another form; all workers do so together.

        Args:
            folder: of the form's job.
        """
        # What is heard of the allocator, and reserved for messages, is for the sizes of the examples.
        self.memory.end()
        self.job, base = Job.load(folder), self._turns[0]
        self.modules = build_beside(self.job, folder, base.modules, self.seat.device, self.teams)
        params = {s: dict(module.named_parameters()) for s, module in self.modules.items()}
        self._own = replace(self._own, job=self.job, modules=self.modules, params=params)
        self._hooks = build_hooks(self._own)
        self.training = self._training(overlaps=self.gradients.overlaps)
        self.evaluation = self._evaluation() if self.job.evaluation else None
        for channel, size in all_ring_sizes(self.job, self.device_id, self.training, self.evaluation).items():
            self._rooms[channel] = size.merged(self._rooms.get(channel, size))
        self.seat.transport.prepare(self._rooms)
        self._turns.append(Turn(self.job, self.modules, self._hooks, self.training, self.evaluation))
        self._at = len(self._turns) - 1

    def _turn(self, form: int) -> None:
        """Run the programs of a form that was added; 0 is that of the job."""
        self._at = form
        self.job, self.modules, self._hooks, self.training, self.evaluation = self._turns[form]
        self.search.runners = tuple(self.training.runners.values())

    def follow(self, values: Sequence[Mapping[str, Any]]) -> None:
        """Take the next steps with other settings of the groups of an optimizer of torch's."""
        assert isinstance(self.spec, TorchOptimizer), "settings of its own change by gpp.LearningRate alone"
        self.spec = self.spec.following(values)
        name_of = {id(param): name for name, param in self.params.items()}
        for optimizer in self.optimizers.values():
            params = [param for group in optimizer.param_groups for param in group["params"]]
            self.spec.settle(optimizer, [(name_of[id(param)], param) for param in params])

    @contextmanager
    def opened(self, out: TextIO) -> Iterator[None]:
        """Ready to `do`; a line of each step goes to `out`."""
        self._lines = Lines(out, holds=False)
        with self.search, ExitStack() as stack:
            stack.callback(self.memory.end)
            stack.callback(self._lines.flush)
            self._listens = self.card is None
            yield

    @property
    def reads(self) -> tuple[str, ...]:
        """Names of the rows that the device's stages read."""
        return tuple(sorted({name for module in self.modules.values() for name in module.inputs}))

    def do(self, what: Do, batch: Mapping[str, torch.Tensor], form: int = 0) -> Answer:
        """Train on a batch, evaluate it, or give the own weights: numbers, and tensors by name.

        Args:
            form: number of the batch's.
        """
        self._turn(form)
        if what == "weights":
            return {}, self._own_weights()
        self.rows.batch = dict(batch)
        return (self._step() if what == "step" else self.evaluate()), {}

    def end(self) -> None:
        """Write down what was measured and the final weights, if there was a step."""
        self._turn(0)
        if self._stop > self.job.settings.first_step:
            self.finish()

    def serve(self, feed: Connection, out: TextIO) -> None:
        """Do what comes through `feed` until the end comes; a line of each step goes to `out`."""
        with self.opened(out):
            tell(feed, {"reads": self.reads, "notes": self.notes})
            while (order := hear(feed))[0]["do"] != "end":
                (does, batch), answer = order, ({}, {})
                if does["do"] == "form":
                    self.add(Path(does["folder"]))
                elif does["do"] == "follow":
                    self.follow(does["values"])
                else:
                    answer = self.do(does["do"], batch, does["form"])
                tell(feed, *answer)
                self.status.enter(SILENT)
            self.end()

    def _step(self) -> dict[str, float]:
        """One optimizer step; the device's share of its losses."""
        found = dict[str, float]()

        def log(record: dict[str, Any]) -> None:
            if self._lines:
                self._lines.step(record)
            found.update({name: value for name, value in record.items() if is_loss(name)})

        self.train(self._stop, 1, log)
        if self.checkpoints.due(self._stop):
            self.memory.end()
            self.status.enter(CHECKPOINT)
            self.checkpoints.save(self._stop)
        if self._at:
            # The measured times are those of steps on batches as the examples.
            self.kept.pop()
        return found

    def _own_weights(self) -> dict[str, torch.Tensor]:
        """Weights and buffers of the device's stages."""
        whole = self.teams.split.whole
        states = {s: {n: whole(n, tensor) for n, tensor in module.state_dict().items()} for s, module in self.modules.items()}
        return {name: tensor for state in self.teams.led(states) for name, tensor in state.items()}


def run(job: Job, run_dir: Path, rank: int, world: int, device: torch.device) -> None:
    """Serve as one worker of `job`, until the program says that it ends."""
    with Client(os.environ[ADDRESS], "AF_UNIX", authkey=bytes.fromhex(os.environ.pop(SECRET))) as feed:
        tell(feed, {"rank": rank})
        with working(job, run_dir, rank, world, device, LiveWorker) as worker, open_lines(run_dir, rank) as out:
            worker.serve(feed, out)


def main(run_dir: Path) -> None:
    """The whole process; does not return."""
    guarded(run_dir, run)
