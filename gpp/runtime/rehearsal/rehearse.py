"""The controller's side of rehearsals: jobs go to a process that forks their workers, and times come back.

Times are seconds that a worker's own thread has computed, where it has one thread on a processor: they hold whatever
else runs on the machine, and however many workers share a core. On cards, and with more threads, they are those of the
device's clock.
"""

from __future__ import annotations

import json
import os
import selectors
import shutil
import statistics
import subprocess
import sys
import weakref
from collections import defaultdict
from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self, final

from gpp.cost.arrivals import Arrivals
from gpp.cost.models.in_place import StageTimes
from gpp.errors import WorkerFailed
from gpp.files import TemporaryFolder
from gpp.graph.op_graph import mask_of
from gpp.program.kinds import BACKWARD, COMPUTE, FORWARD, KINDS, SENDS, UPDATES
from gpp.runtime.job import Job
from gpp.runtime.worker.parent import PARENT, identity, same_modules
from gpp.timeline import Event

UNTIMED = 2
"""First steps that do not count: lazy initialisation, first touch of memory."""

START_S, LONGEST_S = 60.0, 30.0
"""Seconds that the process may take to load torch, and that a rehearsal may take beside what its steps are predicted to."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceTimes:
    """A device in one rehearsal: means over a step, medians over the steps.

    Args:
        forward_s, backward_s: stage -> seconds of a pass, from the call of the stage to its end.
        update_s: seconds of all updates.
        sends: (bytes, seconds) of messages, one pair for each length.
        passes: number of passes.
        rest_s: seconds that the worker computed outside of all that, without those in which it waited.
        waited_s: seconds of the step in which it did not compute.
        step_s: seconds from the end of a step to the end of the next, by the wall's clock.
    """

    device: int
    forward_s: Mapping[int, float]
    backward_s: Mapping[int, float]
    update_s: float
    sends: tuple[tuple[int, float], ...]
    passes: int
    rest_s: float
    waited_s: float
    step_s: float


@final
class Rehearsals:
    """Runs jobs for a few steps, one after the other; a context manager, whose process may be started before."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment
        self._stack = ExitStack()
        self._process: subprocess.Popen[str] | None = None
        self._count = 0

    def __enter__(self) -> Self:
        if self._process is None:
            self.start()
        return self

    def start(self) -> None:
        """Start the process, which loads torch meanwhile; it ends with this process if nothing comes of it."""
        made = self._stack.enter_context(closing(TemporaryFolder("rehearsal")))
        self.folder = made.path
        self._process = self._stack.enter_context(
            subprocess.Popen(
                [sys.executable, "-m", "gpp.runtime.rehearsal.server"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env={**os.environ, **same_modules(), **self._environment, PARENT: identity()},
            )
        )
        self._stack.callback(self._process.kill)
        # A run may end before it rehearses anything.
        weakref.finalize(self, self._stack.close)
        self._ready = False

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End the process; entering the context starts another."""
        self._stack.close()
        self._process = None

    def run(self, job: Job, weights: Mapping[str, Any], *, predicted_s: float, processors: int = 0) -> tuple[DeviceTimes, ...]:
        """Rehearse a job of a few steps without evaluation.

        Args:
            weights: initial weights by full name.
            predicted_s: seconds that a step is predicted to take.
            processors: that the workers may use; 0 for all.

        Raises:
            WorkerFailed: a worker failed, or the rehearsal did not come to its end in time.
        """
        if not self._ready:
            self._read(START_S)
            self._ready = True
        folder, self._count = self.folder / str(self._count), self._count + 1
        job.save(folder, weights)
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write(f"{processors} {folder}\n")
        self._process.stdin.flush()
        code = self._read(LONGEST_S + 20 * predicted_s * job.settings.steps)
        if code != "0":
            reports = [json.loads(path.read_text()) for path in sorted((folder / "ranks").glob("rank_*.error.json"))]
            first = next((report for report in reports if report["kind"] == "error"), reports[0] if reports else None)
            raise WorkerFailed(first["cause"], first["error"]) if first else WorkerFailed(0, f"ended with code {code}")
        paths = sorted((folder / "ranks").glob("device_*.json"))
        found = tuple(_times(json.loads(path.read_text())) for path in paths)
        shutil.rmtree(folder)  # the process may wait for its next job as long as a training takes
        return found

    def _read(self, seconds: float) -> str:
        """The process's next line.

        Raises:
            WorkerFailed: it has ended, or is late.
        """
        assert self._process is not None and self._process.stdout is not None
        with selectors.DefaultSelector() as waits:
            waits.register(self._process.stdout, selectors.EVENT_READ)
            line = self._process.stdout.readline() if waits.select(seconds) else None
        if not line:
            self._process.kill()
            raise WorkerFailed(0, "the rehearsal has ended" if line == "" else f"the rehearsal took more than {seconds:.0f} s")
        return line.strip()


def _times(record: Mapping[str, Any]) -> DeviceTimes:
    """What a worker wrote down, summed up."""
    steps, ends = record["steps"], record["ends"]
    # A step begins where the one before it ends.
    timed = [(steps[n], ends[n - 1], ends[n]) for n in range(UNTIMED, min(len(steps), len(ends)))]
    each: dict[str, list[Any]] = defaultdict(list)
    for step, before, after in timed:
        events = [Event(*event) for event in step["events"]]
        sums: dict[tuple[str, int], list[float]] = defaultdict(list)
        for event in events:
            if event.kind in COMPUTE:
                sums[event.kind, event.stage].append(event.end_s - event.start_s)
        means: dict[tuple[str, int], float] = defaultdict(float)
        for (kind, stage), values in sums.items():
            # Both halves of a backward make one.
            means[FORWARD if KINDS[kind].holds else BACKWARD, stage] += statistics.fmean(values)
        each["passes"].append(means)
        each["count"].append(sum(len(values) for values in sums.values()))
        each["update"].append(sum(e.end_s - e.start_s for e in events if e.kind in UPDATES))
        each["sends"].append([(e.num_bytes, e.end_s - e.start_s) for e in events if e.kind in SENDS])
        # Sums over devices are in the waiting.
        busy = sum(e.end_s - e.start_s for e in events if e.kind in COMPUTE | UPDATES | SENDS)
        each["rest"].append(max(after[0] - before[0] - step["waited_s"] - busy, 0.0))
        each["waited"].append(max((after[1] - before[1]) - (after[0] - before[0] - step["waited_s"]), 0.0))
    by_size: dict[int, list[float]] = defaultdict(list)
    for num_bytes, seconds in (pair for found in each["sends"] for pair in found):
        by_size[num_bytes].append(seconds)
    passes = {key: statistics.median(found[key] for found in each["passes"] if key in found) for key in each["passes"][0]}
    return DeviceTimes(
        device=record["device"],
        forward_s={stage: seconds for (way, stage), seconds in passes.items() if way == FORWARD},
        backward_s={stage: seconds for (way, stage), seconds in passes.items() if way == BACKWARD},
        update_s=statistics.median(each["update"]),
        sends=tuple((size, statistics.median(found)) for size, found in sorted(by_size.items())),
        passes=round(statistics.median(each["count"])),
        rest_s=statistics.median(each["rest"]),
        waited_s=statistics.median(each["waited"]),
        step_s=statistics.median(after[1] - before[1] for _, before, after in timed),
    )


def stage_times(job: Job, devices: tuple[DeviceTimes, ...], pass_s: tuple[float, float]) -> tuple[StageTimes, ...]:
    """The stages of a job that was rehearsed, in place: the slowest device of each.

    Stages whose operators are split over several devices are left out: their passes hold the sums in between.

    Args:
        pass_s: seconds of a forward and of a backward of a stage that computes nothing, which are none of its operators'.
    """
    plan, graph, found = job.plan, job.graph, []
    of_device = {times.device: times for times in devices}
    for s, stage in enumerate(plan.stages):
        own = [of_device[device] for device in stage.devices if device in of_device]
        if stage.tensor_parallel > 1 or not own:
            continue
        params = {name for op in stage.ops for name in graph.trained_by[op]}
        alone = all(len(plan.stages_of_device[times.device]) == 1 for times in own)
        found.append(
            StageTimes(
                ops=stage.ops,
                samples=stage.samples,
                forward_s=max(max(times.forward_s.get(s, 0.0) for times in own) - pass_s[0], 0.0),
                backward_s=max(max(times.backward_s.get(s, 0.0) for times in own) - pass_s[1], 0.0)
                if mask_of(stage.ops) & graph.differentiated
                else 0.0,
                update_s=max(times.update_s for times in own) if params and alone else None,
                trainable_bytes=float(sum(graph.param_of[name].num_bytes for name in params)) if params and alone else 0.0,
            )
        )
    return tuple(found)


def short(job: Job, steps: int, rate: float | None = None) -> Job:
    """The job cut down to a rehearsal: a few steps, no evaluation, no checkpoint.

    Args:
        rate: requests per second; None: another one always waits.
    """
    serving = job.settings.serving
    settings = replace(
        job.settings,
        steps=steps,
        evaluate_every=0,
        evaluation_samples=0,
        final_weights=False,
        checkpoint_every=0,
        resume=None,
        first_step=0,
        serving=serving and replace(serving, arrivals=Arrivals(requests=steps, rate=rate), answers=False),
    )
    return replace(job, settings=settings, evaluation=None)
