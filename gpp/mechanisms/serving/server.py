"""One worker of a pipeline that answers requests: forwards of its stage, without autograd, until the stream ends.

The worker repeats its list of one request (`stream.py`). Interpreter, channels, mailboxes and stages are those of a training
worker; a stage runs in evaluation mode, and its answers go to their place in a file.
"""

from __future__ import annotations

import gc
import json
import os
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist

from gpp.files import write_text
from gpp.mechanisms.serving.answers import Answers, answers_of
from gpp.mechanisms.serving.course import requests_of
from gpp.mechanisms.serving.model import ANSWER
from gpp.mechanisms.serving.stream import StreamStatus, stream_of
from gpp.program.kinds import COMPUTE, RECEIVES, SENDS, Action
from gpp.runtime.job import Job, restore
from gpp.runtime.transport.channels import Channel
from gpp.runtime.transport.shared_memory import RingSize
from gpp.runtime.worker.allocator import MemoryEvents, held_by
from gpp.runtime.worker.build import Teams, build_mailboxes, build_modules, slower
from gpp.runtime.worker.hooks import OwnDevice, build_hooks
from gpp.runtime.worker.interpreter import Interpreter
from gpp.runtime.worker.messages import ring_sizes
from gpp.runtime.worker.process import KEPT_STEPS, Lines, disconnect, enter, guarded, open_lines
from gpp.runtime.worker.seat import Portion, Seat
from gpp.runtime.worker.stage import StageRunner

WARM = 3
"""Requests that go through before the stream: memory is measured meanwhile, and what is made on first use is made."""

AWAKE_S = 5e-4
"""Seconds before a request comes in which its worker no longer sleeps."""

SETTLE_S = 0.05
"""Seconds from the agreement of all workers to the begin of the stream."""


class ServingRunner(StageRunner):
    """A stage that answers.

    `answered` gets (name, first sample, rows) of every answer; it must be set.
    """

    answered: Callable[[str, int, torch.Tensor], None]

    def _take_results(
        self, microbatch: int, lo: int, hi: int, outputs: dict[str, torch.Tensor], empty: Collection[str]
    ) -> list[Any]:
        for name in self.module.results:
            if name in outputs:
                self.answered(name, lo, outputs.pop(name))
        return []


def bounded_rings(sizes: Mapping[Channel, RingSize], buffers: int) -> dict[Channel, RingSize]:
    """The room of every channel: `buffers` messages, and one that a pass reads where it lies.

    With one buffer a message is copied out when it is taken, as the transport lends only where slots are left.
    """
    return {channel: RingSize(size.message_bytes, buffers + 1 if buffers > 1 else 1) for channel, size in sizes.items()}


class Server:
    """A device's share of a job that answers requests."""

    def __init__(self, job: Job, run_dir: Path, seat: Seat) -> None:
        device_id, transport = seat.device_id, seat.transport
        self.job, self.device_id, self.transport = job, device_id, transport
        self.serving, plan = requests_of(job.settings.course), job.plan
        self.stages = plan.stages_of_device[device_id]
        self.actions = job.program.actions[device_id]
        self.counts = {s: plan.minibatch_size // stage.microbatch_size for s, stage in enumerate(plan.stages)}
        self.status = StreamStatus(seat.status, self.actions, self.counts)
        teams = Teams(job, self.stages, device_id, transport, self.status)
        modules = build_modules(job, run_dir, self.stages, seat.device, teams, {})
        self.modules = {s: module.requires_grad_(False).eval_module() for s, module in modules.items()}
        seat = replace(seat, status=self.status)
        own = OwnDevice.at(seat, job=job, modules=self.modules, params={}, handover={})
        mailboxes = build_mailboxes(own, self.modules, job.program, build_hooks(own))
        held = {s: Portion.of(plan.stages[s], device_id, plan.minibatch_size) for s in self.stages}
        self.runners = {
            s: ServingRunner(self.modules[s], seat=own, mailbox=mailboxes[s], portion=held[s], train=False) for s in self.stages
        }
        sends = [action for action in self.actions if action.kind in SENDS]
        each = max((sum(a[1:3] == b[1:3] for b in sends) for a in sends), default=1)
        self.interpreter = Interpreter(
            self.actions,
            self.runners,
            mailboxes,
            seat,
            pending_limit=self.serving.buffers * each - 1,
            slower=slower(job, device_id),
        )
        self.rings = bounded_rings(
            ring_sizes(self.actions, device_id, lambda action: self.runners[action.stage].mailbox.boundary.most_bytes(action)),
            self.serving.buffers,
        )
        self.memory = MemoryEvents(transport.lend)
        makes = any(runner.module.results for runner in self.runners.values())
        self.answers = answers_of(job, run_dir) if self.serving.answers and makes else None
        transport.prepare(self.rings)
        self._rows = self._reader()
        self.kept: deque[dict[str, Any]] = deque(maxlen=KEPT_STEPS)

    def _reader(self) -> Callable[[int, int], dict[str, torch.Tensor]]:
        """Function (lo, hi) -> the user inputs of those samples of the stream: of a micro-batch, which nothing keeps."""
        settings = self.job.settings
        wanted = {name for module in self.modules.values() for name in module.inputs}
        if not wanted:
            return lambda lo, hi: {}
        model = restore(settings.model) if settings.model else None
        samples = restore(settings.data).load(self.serving.split, model, seed=settings.seed, dtype=settings.dtype)
        count = len(samples)
        return lambda lo, hi: samples.fetch(torch.arange(lo, hi) % count, wanted)

    def _begin(self, written: Answers | None) -> None:
        """Let the stages start a stream whose answers go to a file, or nowhere."""

        def answered(name: str, first: int, rows: torch.Tensor) -> None:
            if written is not None:
                dim = self.job.captured.node_of[name.removeprefix(ANSWER)].batch_dim or 0
                written.write(name.removeprefix(ANSWER), first, rows.movedim(dim, 0))

        for runner in self.runners.values():
            runner.answered = answered
            runner.begin(self._rows, lambda microbatch: 0, 0)

    def _requests(self, first: int, end: int, *, begin: int) -> Iterator[tuple[int, list[Action]]]:
        """Number, from `begin` on, and actions of the requests of a stream."""
        size = self.job.plan.minibatch_size
        return self.status.told(stream_of(self.actions, self.serving.buffers, self.counts, size, end, first), begin)

    def warm_up(self) -> int:
        """Let some requests through that nobody asked for; returns the peak of this device's memory."""
        self._begin(None)
        self.memory.begin(held_by(self.modules.values(), (), ()))
        for _, actions in self._requests(0, WARM, begin=-WARM):
            self.interpreter.run(actions, ends=False)
            self.interpreter.take()
        self.transport.flush()
        self.memory.end()
        # The slot that a pass reads stands for the copy that was measured in its place.
        incoming = [size for channel, size in self.rings.items() if channel[4] == self.device_id]
        return self.memory.peak_bytes + sum(min(self.serving.buffers, size.slots) * size.message_bytes for size in incoming)

    def run(self, out: TextIO, ranks: Path) -> None:
        """The whole stream; one JSON line for each request to `out`."""
        gc.collect()
        gc.freeze()
        peak = self.warm_up()
        lines = Lines(out, holds=any(action.kind in RECEIVES for action in self.actions))
        self.transport.idle = lines.flush
        self.serve(lines.step)
        lines.flush()
        result = {"device": self.device_id, "peak_memory_bytes": peak, "steps": list(self.kept)}
        write_text(ranks / f"device_{self.device_id}.json", json.dumps(result), exact=True)

    def serve(self, log: Callable[[dict[str, Any]], None]) -> None:
        """Answer all requests.

        Args:
            log: gets a record of each: number, when it came or was begun, and when this device was done with it.
        """
        self._begin(self.answers)
        source = any(not self.job.plan.predecessors[s] for s in self.stages)
        arrivals = self.serving.arrivals.times_s() if self.serving.arrivals.rate and source else None
        if self.serving.arrivals.rate:
            workers = sorted(self.job.program.actions)
            stay(workers.index(self.device_id), len(workers), self.job.settings.threads)
        latest = torch.tensor([time.perf_counter()], dtype=torch.float64)
        dist.all_reduce(latest, op=dist.ReduceOp.MAX)
        epoch = float(latest.item()) + SETTLE_S
        settings = self.job.settings
        for number, actions in self._requests(settings.first_step, settings.steps, begin=settings.first_step):
            came = None
            if arrivals is not None:
                # The source's clock stands still between two plans.
                came = epoch + arrivals[number] - arrivals[settings.first_step]
                self._wait(came)
            self.interpreter.run(actions, ends=False)
            end = time.perf_counter()
            events, waited_s = self.interpreter.take()
            passes = [event for event in events if event.kind in COMPUTE]
            begun = min((event.start_s for event in passes), default=end)
            pass_s = sum(event.end_s - event.start_s for event in passes) / max(len(passes), 1)
            self.kept.append({"step": number, "start": begun, "end": end, "waited_s": waited_s, "events": events})
            log({"step": number, "start": begun if came is None else came, "end": end, "pass_s": pass_s})
        self.transport.flush()
        if self.answers:
            self.answers.close()

    def _wait(self, until_s: float) -> None:
        """Sleep until a request comes; what has been made goes out first."""
        if until_s > time.perf_counter():
            self.status.waiting(True)
            self.transport.flush()
            while (left := until_s - time.perf_counter()) > 0:
                # Whoever sleeps to the end is woken a few tenths of a millisecond late, which each request would wait.
                time.sleep(max(left - AWAKE_S, 0.0))
            self.status.waiting(False)


def stay(rank: int, workers: int, threads: int) -> None:
    """Keep the calling thread on a processor of its own, if there is one for each worker.

    Linux may wake two workers on one processor that a request reaches at the same moment, and leave them there for longer than a
    pass takes: their passes then take twice as long beside an idle processor.

    Args:
        rank: of the worker.
        workers: of all of them, on this machine.
        threads: of each; with several torch's own threads share what the worker has.
    """
    cores = sorted(os.sched_getaffinity(0))
    if threads == 1 and workers <= len(cores):
        os.sched_setaffinity(0, {cores[rank]})


def _run(job: Job, run_dir: Path, rank: int, world: int, device: torch.device) -> None:
    seat = enter(job, run_dir, rank, world, device)
    with torch.inference_mode(), open_lines(run_dir, rank) as out:
        Server(job, run_dir, seat).run(out, run_dir / "ranks")
    disconnect(seat.status)


def main(run_dir: Path) -> None:
    """The whole process; does not return."""
    guarded(run_dir, _run)
