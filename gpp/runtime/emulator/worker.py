"""Emulated devices as processes: one process forks one worker a device.

One process loads torch and the job, and forks before it starts any thread: 32 workers are up in two seconds, where 32
processes that import torch each take half a minute on two cores. A worker connects, walks its program and writes its
log as a real one does.
"""

from __future__ import annotations

import gc
import json
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist

from gpp.files import write_text
from gpp.program.added import copy_costs
from gpp.program.held import Meter
from gpp.program.kinds import COMPUTE, COPIES, KINDS, OWNERS, Resource
from gpp.runtime.emulator.emulated import (
    CLOCKS,
    Clock,
    EmulatedHost,
    EmulatedMailbox,
    EmulatedRunner,
    EmulatedSums,
    sharpen_timer,
    sleep_until,
)
from gpp.runtime.emulator.pace import Pace
from gpp.runtime.hang_detection.status import TRAINING, AbstractStatus, NoStatus
from gpp.runtime.job import Job, restore
from gpp.runtime.transport.channels import AbstractTransport
from gpp.runtime.transport.form import MAIN_MEMORY
from gpp.runtime.worker.forked import fork_workers
from gpp.runtime.worker.interpreter import BesidePasses, Interpreter
from gpp.runtime.worker.messages import ring_sizes
from gpp.runtime.worker.process import KEPT_STEPS, disconnect, enter, guarded, open_lines, write_line
from gpp.runtime.worker.seat import Seat
from gpp.runtime.worker.stage import Span
from gpp.simulate.messages import message_rates
from gpp.simulate.period import Period

Agree = Callable[[list[float]], list[float]]
"""Function that gives every worker the largest value at each place over all workers."""

SETTLE_S = 0.05
"""Seconds from the agreement on a step to its common start: every worker has heard of it by then."""


class EmulatedWorker:
    """A device's share of a job.

    A program that drains is run step after step as in training: each device goes on as soon as its own part of a step
    is over. So what is measured is a period. One that does not drain is run as a whole from a common start every time.

    Args:
        device_id: the device of the plan that this worker is.
        transport: messages to the other devices.
        agree: an agreement of all workers.
        status: is told the worker's actions.
    """

    def __init__(
        self, job: Job, *, device_id: int, transport: AbstractTransport, agree: Agree, status: AbstractStatus | None = None
    ) -> None:
        plan, graph, cluster = job.plan, job.graph, job.cluster
        self.job, self.device_id, self.agree, self.clock = job, device_id, agree, Clock()
        self.status = status or NoStatus()
        rates = message_rates(plan, graph)
        self.virtual_updates: dict[int, list[float]] = {}
        mailboxes = {
            s: EmulatedMailbox(stage=s, device_id=device_id, transport=transport, rates=rates, cluster=cluster, clock=self.clock)
            for s in plan.stages_of_device[device_id]
        }
        self.host = EmulatedHost(copy_costs(plan, graph, cluster, job.costs), self.clock)
        actions, stages = job.program.actions[device_id], plan.stages_of_device[device_id]
        self.held = Meter(stages, {action.stage for action in actions if KINDS[action.kind].returns})
        self.runners = {
            s: EmulatedRunner(
                stage=s,
                cost=job.costs[s],
                last=-(-job.program.num_samples // plan.stages[s].microbatch_size) - 1,
                mailbox=mailbox,
                host=self.host,
                clock=self.clock,
                held=self.held,
            )
            for s, mailbox in mailboxes.items()
        }
        self.interpreter = Interpreter(
            actions,
            self.runners,
            mailboxes,
            Seat(device_id=device_id, device=MAIN_MEMORY, transport=transport, status=self.status),
            BesidePasses(
                sums=EmulatedSums(plan, graph, cluster, device_id=device_id, transport=transport, clock=self.clock),
                update=self._update,
                own={kind: partial(self._run, kind) for kind in COMPUTE & OWNERS.keys()}
                | {kind: partial(self._copy, KINDS[kind].occupies) for kind in COPIES},
            ),
        )
        transport.prepare(ring_sizes(job.program.actions[device_id], device_id, lambda action: CLOCKS.num_bytes))

    def _run(self, kind: str, stage: int, microbatch: int) -> Span:
        return self.runners[stage].run(kind, microbatch)

    def _copy(self, way: Resource, stage: int, microbatch: int) -> Span:
        runner = self.runners[stage]
        return runner.copy_out(microbatch) if way is Resource.COPY_OUT else runner.fetch(microbatch)

    def _update(self, stage: int, minibatch: int) -> None:
        self.runners[stage].update()
        self.virtual_updates.setdefault(stage, []).append(self.clock.virtual_s)

    def begin(self, time_scale: float) -> float:
        """Let all workers' clocks run on from where they stand, which is agreed on by this machine's clock.

        Args:
            time_scale: 0 does not wait for any clock.

        Returns:
            When the last of them goes on.
        """
        if self.job.streams:
            self.clock.virtual_s = 0.0
        self.status.waiting(True)
        start, earliest, latest = self.agree([time.perf_counter() + SETTLE_S, -self.clock.virtual_s, self.clock.virtual_s])
        self.status.waiting(False)
        self.clock.time_scale, self.clock.zero_s = time_scale, start + earliest * time_scale
        self.host.channels.begin(anew=self.job.streams)
        if self.job.streams:
            self.held.begin()
        for runner in self.runners.values():
            runner.begin(anew=self.job.streams)
        sleep_until(max(start, self.clock.real_s(self.clock.virtual_s)))
        return self.clock.real_s(latest) if time_scale else start

    def step(self, number: int = 0) -> dict[str, Any]:
        """Run through the program once, from where the clock stands.

        Returns its record: start and end (monotonic seconds), virtual_s, events; of a pipeline that does not drain,
        virtual_updates: stage -> when its updates ended.
        """
        self.status.begin(TRAINING, number)
        self.virtual_updates, self.clock.opened_s = {}, None
        start = time.perf_counter()
        self.interpreter.run()
        events, waited_s = self.interpreter.take()
        record = {"start": start, "end": time.perf_counter(), "virtual_s": self.clock.virtual_s, "waited_s": waited_s}
        return {**record, "events": events, **({"virtual_updates": self.virtual_updates} if self.job.streams else {})}

    def rehearse(self) -> tuple[dict[str, Any], float]:
        """Steps that wait for no clock, until the period shows; the record of the last, and the period
        (`gpp.simulate.period`).
        """
        period = Period(self.agree)
        while True:
            self.begin(0.0)
            before = self.clock.virtual_s
            done = self.step()
            opened = float("inf") if self.clock.opened_s is None else self.clock.opened_s
            own = [
                (before, opened, self.clock.virtual_s),
                *self.host.channels.used(),
                *(c for runner in self.runners.values() for c in runner.mailbox.channels.used()),
            ]
            seconds = period.after(*zip(*own, strict=True))
            if seconds is not None:
                return done, seconds

    def run(self, out: TextIO, ranks: Path) -> None:
        """All steps, one JSON line each to `out`: the first one unpaced, which sets the time scale of the others."""
        settings, kept = self.job.settings, []
        pace = Pace(**settings.engine)
        time_scale = virtual_s = 0.0
        for step in range(settings.steps):
            if step == 0 and not self.job.streams:
                done, virtual_s = self.rehearse()
                start = done["start"]
            else:
                start = self.begin(time_scale) if step < 2 or self.job.streams else None
                done = self.step(step)
                virtual_s = done["virtual_s"] if self.job.streams else virtual_s
            kept.append({"step": step, "time_scale": time_scale, **done, "virtual_s": virtual_s})
            write_line(out, {"step": step, "start": start or done["start"], "end": done["end"]})
            if step == 0:
                virtual_s, unpaced_s = self.agree([virtual_s, done["end"] - done["start"]])
                time_scale = pace.choose(virtual_s, unpaced_s, settings.steps - 1)
        peak = round(self.held.peak_bytes({s: self.job.costs[s].memory for s in self.runners}))
        result = {"device": self.device_id, "peak_memory_bytes": peak, "steps": kept[-KEPT_STEPS:]}
        if self.job.streams:
            policy, places = restore(settings.weights), {s: self.job.plan.position(s) for s in self.runners}
            result |= {
                "weight_versions": {s: policy.copies(place) for s, place in places.items()},
                "staleness": {s: policy.staleness(place) for s, place in places.items()},
            }
        write_text(ranks / f"device_{self.device_id}.json", json.dumps(result), exact=True)


def largest(values: list[float]) -> list[float]:
    """The largest value at each place over all workers."""
    tensor = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return tensor.tolist()


def main(run_dir: Path) -> None:
    """The whole process; does not return."""
    run_emulated(run_dir, EmulatedWorker)


def run_emulated(run_dir: Path, made: Callable[..., Any]) -> None:
    """Fork the workers of a job; does not return.

    Args:
        made: makes a device's share of the job, as `EmulatedWorker` does.
    """
    job = Job.load(run_dir)
    # Objects loaded by now are shared with the workers as long as nobody writes to them.
    gc.freeze()

    def run(job: Job, run_dir: Path, rank: int, world: int, device: torch.device) -> None:
        sharpen_timer()
        seat = enter(job, run_dir, rank, world, device)
        worker = made(job, device_id=seat.device_id, transport=seat.transport, agree=largest, status=seat.status)
        # A pause to collect garbage would be a late message.
        gc.disable()
        with open_lines(run_dir, rank) as out:
            worker.run(out, run_dir / "ranks")
        disconnect(seat.status)

    def worker(rank: int) -> None:
        os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
        guarded(run_dir, run, job)

    fork_workers(worker, int(os.environ["WORLD_SIZE"]), run_dir / "ranks")
