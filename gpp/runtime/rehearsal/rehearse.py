"""The controller's side of rehearsals: jobs go to a process that forks their workers, and times come back.

Times are seconds that a worker's own thread has computed, where it has one thread on a processor: they hold whatever
else runs on the machine, and however many workers share a core. On cards, and with more threads, they are those of the
device's clock. Where every worker has a core and others leave the machine alone, passes, updates and messages are known by the
wall's clock too (`AtWork`), as a run will measure them: what the kernel and the hypervisor take from a worker is in them.
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
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self, final

from gpp.child import same_modules
from gpp.cost.load import others
from gpp.cost.models.in_place import StageTimes
from gpp.errors import WorkerFailed
from gpp.files import TemporaryFolder
from gpp.graph.op_graph import mask_of
from gpp.program.kinds import BACKWARD, COMPUTE, FORWARD, KINDS, SENDS, UPDATES
from gpp.runtime.job import Job, WritesItself
from gpp.runtime.worker.parent import PARENT, identity
from gpp.timeline import Event

UNTIMED = 2
"""First steps that do not count: lazy initialisation, first touch of memory."""

START_S, LONGEST_S = 60.0, 30.0
"""Seconds that the process may take to load torch, and that a rehearsal may take beside what its steps are predicted to."""


QUIET = 0.05
"""Share of the processors that other programs may have while the wall's clock counts: a pass whose worker is displaced for a share
of the time takes longer by that share on average."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class AtWork:
    """A device in one rehearsal by the wall's clock, while all workers were at work and nothing else was.

    Args:
        forward_s, backward_s, update_s: as `DeviceTimes` has them.
        send_s: seconds of all messages that it sent in a step.
    """

    forward_s: Mapping[int, float]
    backward_s: Mapping[int, float]
    update_s: float
    send_s: float


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
        others: share of this machine's processors that other programs had meanwhile.
        at_work: the same by the wall's clock; None where others had the processors, or workers shared them.
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
    others: float = 0.0
    at_work: AtWork | None = None


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

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process; entering the context starts another."""
        self._stack.close()
        self._process = None

    def run(
        self, job: Job, weights: Mapping[str, Any] | WritesItself, *, predicted_s: float, processors: int = 0
    ) -> tuple[DeviceTimes, ...]:
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
        records = [json.loads(path.read_text()) for path in paths]
        share = _others(records)
        apart = len(records) <= min(processors or len(os.sched_getaffinity(0)), len(os.sched_getaffinity(0)))
        found = tuple(_times(record, share, quiet=apart and share <= QUIET) for record in records)
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


def _others(records: Sequence[Mapping[str, Any]]) -> float:
    """The share of this machine's processors that others than the workers had during the steps that count."""
    spans = [
        [last - first for first, last in zip(ends[UNTIMED - 1], ends[-1], strict=True)]
        for ends in (record["ends"] for record in records)
        if len(ends) > UNTIMED
    ]
    if not spans:
        return 0.0
    _, walls_s, own_s, busy = zip(*spans, strict=True)
    return others(statistics.median(busy), sum(own_s), statistics.median(walls_s) * (os.cpu_count() or 1))


def _times(record: Mapping[str, Any], share: float, *, quiet: bool) -> DeviceTimes:
    """What a worker wrote down, summed up.

    Args:
        share: of the processors, that others had.
        quiet: whether the wall's clock says how long its actions take.
    """
    steps, ends, walls = record["steps"], record["ends"], record["walls"]
    # A step begins where the one before it ends.
    timed = [(steps[n], ends[n - 1], ends[n]) for n in range(UNTIMED, min(len(steps), len(ends)))]
    by_thread = [[Event(*event) for event in step["events"]] for step, _, _ in timed]
    own = [_seconds(events, [event.end_s - event.start_s for event in events]) for events in by_thread]
    by_size: dict[int, list[float]] = defaultdict(list)
    for event in (event for events in by_thread for event in events if event.kind in SENDS):
        by_size[event.num_bytes].append(event.end_s - event.start_s)
    rest, waited = [], []
    for (step, before, after), seconds in zip(timed, own, strict=True):
        # Sums over devices are in the waiting.
        rest.append(max(after[0] - before[0] - step["waited_s"] - seconds.all_s, 0.0))
        waited.append(max((after[1] - before[1]) - (after[0] - before[0] - step["waited_s"]), 0.0))
    at_work = None
    took = walls[UNTIMED : UNTIMED + len(timed)]
    if quiet and all(seconds is not None for step in took for seconds in step):
        wall = [_seconds(events, seconds) for events, seconds in zip(by_thread, took, strict=True)]
        at_work = AtWork(
            forward_s=_passes(wall, FORWARD),
            backward_s=_passes(wall, BACKWARD),
            update_s=statistics.median(step.update_s for step in wall),
            send_s=statistics.median(step.send_s for step in wall),
        )
    return DeviceTimes(
        device=record["device"],
        forward_s=_passes(own, FORWARD),
        backward_s=_passes(own, BACKWARD),
        update_s=statistics.median(step.update_s for step in own),
        sends=tuple((size, statistics.median(found)) for size, found in sorted(by_size.items())),
        passes=round(statistics.median(step.passes for step in own)),
        rest_s=statistics.median(rest),
        waited_s=statistics.median(waited),
        step_s=statistics.median(after[1] - before[1] for _, before, after in timed),
        others=share,
        at_work=at_work,
    )


class _RehearsedStep(NamedTuple):
    """A device's seconds in one step."""

    passes_s: Mapping[tuple[str, int], float]
    """Direction and stage -> mean seconds of a pass; the parts of a backward make one."""
    passes: int
    """Their number."""
    update_s: float
    send_s: float
    all_s: float
    """Passes, updates and messages."""


def _seconds(events: Sequence[Event], seconds: Sequence[float]) -> _RehearsedStep:
    """The seconds of one step's events, given those of each."""
    sums: dict[tuple[str, int], list[float]] = defaultdict(list)
    update_s = send_s = 0.0
    for event, took in zip(events, seconds, strict=True):
        if event.kind in COMPUTE:
            sums[event.kind, event.stage].append(took)
        elif event.kind in UPDATES:
            update_s += took
        elif event.kind in SENDS:
            send_s += took
    means: dict[tuple[str, int], float] = defaultdict(float)
    for (kind, stage), values in sums.items():
        means[FORWARD if KINDS[kind].holds else BACKWARD, stage] += statistics.fmean(values)
    computed_s = sum(map(sum, sums.values()))
    return _RehearsedStep(means, sum(map(len, sums.values())), update_s, send_s, computed_s + update_s + send_s)


def _passes(steps: Sequence[_RehearsedStep], way: str) -> dict[int, float]:
    """Stage -> seconds of a pass in one direction: medians over the steps."""
    stages = [stage for found, stage in (steps[0].passes_s if steps else ()) if found == way]
    return {
        stage: statistics.median(step.passes_s[way, stage] for step in steps if (way, stage) in step.passes_s) for stage in stages
    }


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
        if stage.devices_per_replica > 1 or not own:
            continue
        params = {name for op in stage.ops for name in graph.trained_by[op]}
        alone = all(len(plan.stages_of_device[times.device]) == 1 for times in own)
        # As the run will measure them, where that is known; by one clock for all devices of a stage.
        walls = [times.at_work for times in own if times.at_work is not None]
        clocked = walls if len(walls) == len(own) else own
        found.append(
            StageTimes(
                ops=stage.ops,
                samples=stage.samples,
                forward_s=max(max(times.forward_s.get(s, 0.0) for times in clocked) - pass_s[0], 0.0),
                backward_s=max(max(times.backward_s.get(s, 0.0) for times in clocked) - pass_s[1], 0.0)
                if mask_of(stage.ops) & graph.differentiated
                else 0.0,
                update_s=max(times.update_s for times in clocked) if params and alone else None,
                trainable_bytes=float(sum(graph.param_of[name].num_bytes for name in params)) if params and alone else 0.0,
            )
        )
    return tuple(found)


def message_factor(devices: Sequence[DeviceTimes], predicted_s: float) -> float | None:
    """What messages took their senders in place, for each second that was predicted; None where it is not known.

    Args:
        predicted_s: seconds of all messages of a step at their senders.
    """
    walls = [times.at_work.send_s for times in devices if times.at_work is not None]
    return sum(walls) / predicted_s if len(walls) == len(devices) and predicted_s > 0 and sum(walls) > 0 else None


def short(job: Job, steps: int, rate: float | None = None) -> Job:
    """The job cut down to a rehearsal: a few steps, no evaluation, no checkpoint.

    Args:
        rate: mini-batches per second, where nothing is trained; None: another one always waits.
    """
    course = job.settings.course
    settings = replace(
        job.settings,
        steps=steps,
        evaluate_every=0,
        evaluation_samples=0,
        final_weights=False,
        checkpoint_every=0,
        resume=None,
        first_step=0,
        course=course and course.short(steps, rate),
    )
    return replace(job, settings=settings, evaluation=None)
