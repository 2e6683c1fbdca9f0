"""Runs that go on under a new plan: those that train nothing, whose devices may be lost or slow, and trainings whose devices may be
slow.

Both watch the passes of their workers by one rule, and plan for the devices at the speeds that they have shown (`gpp.replan`).

A run that trains nothing ends its workers, the strategy plans for what is left, and new workers begin with the first mini-batch
that is not done. Mini-batches are numbered, and each can be made again from its number. One counts as done once every worker has
said that its part is; what some worker has written of later ones is written again to the same place. So nothing is lost, doubled,
or out of order.

A training keeps its workers. The plan that moves from the present one reach (`gpp.app.moving`) is proved as the first one was, and
left for the workers, which take it after the next multiple of `strategy.replan.every` steps (`gpp.runtime.worker.takeover`).
"""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from gpp.app.moving import better, changes, transfer_s
from gpp.app.stopping import held_back
from gpp.errors import GppError, Infeasible, OffPace, WorkerFailed
from gpp.files import copy
from gpp.replan import DevicePace, Replaced, Replan, Switch, at_speeds, without
from gpp.report.draw import text
from gpp.runtime.mode import course_run
from gpp.runtime.worker.announced import announce
from gpp.runtime.worker.announced import announced as announced_at
from gpp.serialization import write_value

if TYPE_CHECKING:
    from gpp.app.experiment import Experiment
    from gpp.app.moving import Better
    from gpp.app.recording import Recorder
    from gpp.cost.problem import Problem
    from gpp.plan.plan import Plan
    from gpp.runtime.engine import Progress, Taken
    from gpp.runtime.job import Job
    from gpp.timeline import Outcome

REPLACED = "replaced"
"""Folder of the plans that were replaced, by number; of a run that trains nothing with what its workers wrote."""

UNTIMED_STEPS = 2
"""First steps of a worker under a plan that say nothing of its pace: memory is touched first, and the allocator is listened to."""


def execute(experiment: Experiment, problem: Problem, job: Job, recorder: Recorder) -> Outcome:
    """Run a job saved in the recorder's directory, under new plans where `strategy.replan` has it.

    Raises:
        InvalidConfig: the disk has no room for what is written.
        WorkerFailed: a worker failed of itself, or once too often.
        Infeasible: nothing fits on the devices that are left.
    """
    try:
        return _execute(experiment, problem, job, recorder)
    finally:
        # Whatever has ended the workers.
        if (course := course_run(job)) is not None:
            with held_back():
                count, warning = course.finish(recorder.run_dir)
                recorder.know(answers=count)
                if warning:
                    recorder.warn(warning)


def _execute(experiment: Experiment, problem: Problem, job: Job, recorder: Recorder) -> Outcome:
    engine, progress, run_dir, settings = experiment.engine, recorder.progress(), recorder.run_dir, experiment.strategy.replan
    course = course_run(job)
    if course is not None and engine.needs_weights:
        course.check_room(job, run_dir)
    if not settings.every:
        return engine.execute(job, run_dir, progress)
    if course is None:
        return _ReplannedTraining(experiment, problem, job, progress, recorder).run(run_dir)
    run, number = _ReplannedCourse(experiment, problem, job, progress), 0
    while settings.most is None or number < settings.most:
        try:
            return run.run(run_dir, settings)
        except (WorkerFailed, OffPace) as error:
            run.replace_plan(error)
        # The plan that is replaced, and what its workers wrote, are kept.
        for part in ("job/plan.json", "ranks"):
            copy(run_dir / part, run_dir / REPLACED / str(number) / Path(part).name)
        number += 1
        run.job.save(run_dir)
        recorder.know(plan=run.plan, predicted=experiment.strategy.predict(run.plan, run.problem))
    return run.run(run_dir, replace(settings, every=0))


class _ReplannedRun:
    """The common part of trainings and of runs that train nothing: the plan under way, and the speeds that its devices have shown.

    `problem.cluster` has the devices at these speeds.
    """

    def __init__(self, experiment: Experiment, problem: Problem, job: Job, progress: Progress) -> None:
        self._experiment, self._captured, self._progress = experiment, job.captured, progress
        self._machines = problem.cluster
        """The devices as they were described, which is what workers are told."""
        self.problem, self.plan, self.job = problem, job.plan, job
        self.replaced: list[Replaced] = []

    @property
    def _devices(self) -> list[int]:
        """The device of each rank."""
        return sorted(self.plan.stages_of_device)

    def _planned_s(self) -> dict[int, float]:
        """Seconds of the passes of each rank, as workers measure them: without what messages take."""
        raise NotImplementedError

    def _slowed(self, factors: Mapping[int, float]) -> Problem:
        """The problem with the devices at the speeds that they have shown, by rank."""
        cluster = at_speeds(self.problem.cluster, {self._devices[rank]: factor for rank, factor in factors.items()})
        return replace(self.problem, cluster=cluster)

    def _job_of(self, problem: Problem, plan: Plan) -> Job:
        return replace(self._experiment.job(self._captured, problem, plan), cluster=self._machines)


class _ReplannedCourse(_ReplannedRun):
    """The state of a run that trains nothing: what is done, and under which plan it goes on."""

    def __init__(self, experiment: Experiment, problem: Problem, job: Job, progress: Progress) -> None:
        # Mini-batches stay cut as they are: results are then equal to the bit, whatever the plan.
        problem = replace(problem, microbatch_size=job.plan.stages[0].microbatch_size)
        super().__init__(experiment, problem, job, progress)
        self._ended = job.settings.first_step
        self._names = tuple(range(problem.cluster.num_devices))
        """What the user calls the devices that are left."""

    def run(self, run_dir: Path, settings: Replan) -> Outcome:
        """Do what is left.

        Raises:
            OffPace: devices are off their time, and another plan is better then.
            WorkerFailed: as the engine has it.
        """
        progress = replace(self._progress, on_step=self._on_step)
        if settings.every:
            pace = DevicePace(self._planned_s(), settings)

            def on_pass(rank: int, seconds: float) -> None:
                pace.note(rank, seconds)
                if off := pace.off():
                    problem = self._slowed(factors := pace.factors())
                    if self._experiment.strategy.plan(problem).stages != self.plan.stages:
                        raise OffPace(off, factors)
                    self.problem = problem
                    pace.expect(self._planned_s())

            progress = replace(progress, on_pass=on_pass)
        return replace(self._experiment.engine.execute(self.job, run_dir, progress), replaced=tuple(self.replaced))

    def _on_step(self, step: int, loss: float | None, rate: float | None) -> None:
        if step > self._ended:
            self._ended = step
            self._progress.on_step(step, loss, rate)

    def _planned_s(self) -> dict[int, float]:
        bills, beside = self.plan.bills(self.problem), self.plan.beside_s(self.problem)
        stage_of = self.plan.stage_of_device
        return {rank: bills[stage_of[device]].forward_s - beside[stage_of[device]][0] for rank, device in enumerate(self._devices)}

    def replace_plan(self, error: WorkerFailed | OffPace) -> None:
        """Take the plan for what is left.

        Raises:
            WorkerFailed: no device is gone, so that the same would happen again; or none is left.
            Infeasible: nothing fits any more.
        """
        lost, slow, names = set[int](), dict[int, float](), self._names
        plan_for = self._experiment.strategy.plan
        if isinstance(error, OffPace):
            slow = {names[self._devices[rank]]: factor for rank, factor in error.off.items()}
            self.problem = self._slowed(error.factors)
            self.plan = plan_for(self.problem)
        else:
            gone = {self._devices[rank] for rank in error.gone}
            if not gone or len(gone) == len(names):
                raise error
            lost = {names[device] for device in gone}
            cluster, kept = without(self.problem.cluster, gone)
            self._machines, _ = without(self._machines, gone)
            try:
                self.problem = replace(self.problem, cluster=cluster)
                self.plan = plan_for(self.problem)
            except Infeasible as why:
                words = f"without device {', '.join(map(str, sorted(lost)))}, which is lost: {why.constraint}"
                raise Infeasible(words, why.remedy) from error
            self._names = tuple(names[device] for device in kept)
        job = self._job_of(self.problem, self.plan)
        # Where all is done, the last mini-batch is made once more, for the workers' own end.
        first = min(self._ended, job.settings.steps - 1)
        self.job = replace(job, settings=replace(job.settings, first_step=first))
        found = Replaced(
            first=first + 1,
            lost=tuple(sorted(lost)),
            slow=slow,
            reason="" if isinstance(error, OffPace) else error.reason.splitlines()[0],
            stages=len(self.plan.stages),
            devices=self._names,
        )
        self.replaced.append(found)
        self._progress.warn(str(found))


class _AnnouncedPlan(NamedTuple):
    """A plan that the workers are to take."""

    problem: Problem
    found: Better
    slow: dict[int, float]
    bytes: int
    transfer_s: float
    restart_s: float


class _ReplannedTraining(_ReplannedRun):
    """The state of a training: its pace, and what has been announced to its workers."""

    def __init__(self, experiment: Experiment, problem: Problem, job: Job, progress: Progress, recorder: Recorder) -> None:
        super().__init__(experiment, problem, job, progress)
        self._recorder, self._settings = recorder, experiment.strategy.replan
        self._first, self._done = job.settings.first_step, job.settings.first_step
        self._pace = DevicePace(self._planned_s(), self._settings)
        self._passes: dict[int, int] = {}
        self._took: dict[int, float] = {}
        self._built: dict[int, float] = {}
        self._restart_s: float | None = None
        self._announced: _AnnouncedPlan | None = None
        self._unpaid = False
        """Whether it has been said that a switch does not pay."""
        self._dearer: dict[int, float] = dict.fromkeys(range(len(self._devices)), 1.0)
        """How many times as long as planned the passes of each rank take for what they compute; empty until that has shown."""

    def run(self, run_dir: Path) -> Outcome:
        """Train to the end, under as many plans as pay."""
        self._run_dir = run_dir
        progress = replace(
            self._progress,
            on_step=self._on_step,
            on_pass=self._on_pass,
            on_built=self._built.__setitem__,
            on_taken=self._on_taken,
        )
        outcome = self._experiment.engine.execute(self.job, run_dir, progress)
        firsts = [one.first - 1 for one in self.replaced] + [self.job.settings.steps]
        for number, found in enumerate(self.replaced):
            assert found.switch is not None
            after = self._samples_per_s(firsts[number] + UNTIMED_STEPS, firsts[number + 1])
            switch = replace(found.switch, samples_per_s=(found.switch.samples_per_s[0], after))
            self.replaced[number] = replace(found, switch=switch)
        return replace(outcome, replaced=tuple(self.replaced))

    def _planned_s(self) -> dict[int, float]:
        bills, beside = self.plan.bills(posed := self._experiment.strategy.posed(self.problem)), self.plan.beside_s(posed)
        out = dict.fromkeys(range(len(self._devices)), 0.0)
        for rank, device in enumerate(self._devices):
            for s in self.plan.stages_of_device[device]:
                stage = self.plan.stages[s]
                passes = -(-self.plan.minibatch_size // stage.microbatch_size) / stage.stride
                out[rank] += passes * (bills[s].forward_s + bills[s].backward_s - sum(beside[s]))
        return out

    def _on_step(self, step: int, loss: float | None, rate: float | None) -> None:
        self._done = step
        if rate is not None:
            self._took[step - 1] = self.plan.minibatch_size / rate
        self._progress.on_step(step, loss, rate)

    def _on_pass(self, rank: int, seconds: float) -> None:
        self._passes[rank] = self._passes.get(rank, 0) + 1
        most = self._settings.most
        if self._passes[rank] <= UNTIMED_STEPS or self._announced or (most is not None and len(self.replaced) >= most):
            return
        self._pace.note(rank, seconds)
        if not self._dearer:
            if usual := self._pace.usual():
                self._dearer = usual
                self._measure()
        elif off := self._pace.off():
            self._look(off, self._pace.factors())

    def _measure(self) -> None:
        """Begin a window against what passes take under the present plan, at the speeds that devices have shown."""
        self._pace.expect({rank: seconds * self._dearer.get(rank, 1.0) for rank, seconds in self._planned_s().items()})

    def _look(self, off: Mapping[int, float], factors: Mapping[int, float]) -> None:
        """Devices are off their time: announce the plan for the speeds that they have shown, if it pays."""
        problem, slow = self._slowed(factors), {self._devices[rank]: factor for rank, factor in off.items()}
        found = better(self._experiment.strategy, self.plan, problem)
        if found is None or self._announce(found, problem, slow):
            self.problem = problem
        self._measure()

    def _announce(self, found: Better, problem: Problem, slow: dict[int, float]) -> bool:
        """Let the workers take a plan over, where that pays; False where it may pay later."""
        every, steps = self._settings.every, self.job.settings.steps
        left = steps - (self._done // every + 1) * every
        # Speeds that have changed once may change again as soon.
        counted = min(left, self._done + 1 - self.replaced[-1].first) if self.replaced else left
        rate = self._samples_per_s(self._done - every, self._done)
        if rate is None or left <= 0:
            return False
        try:
            job = self._job_of(problem, found.plan)
            sent = _sent(self.job, job, problem.optimizer_state_factor)
            restart_s = self._first_restart_s(job, problem) if self._restart_s is None else self._restart_s
            pause_s = (moving_s := transfer_s(self._machines, sent)) + restart_s
            gain_s = (1.0 - found.after_s / found.before_s) * self.plan.minibatch_size / rate * counted
            if gain_s <= pause_s:
                if not self._unpaid:
                    words = f"another plan would gain {text.seconds(gain_s)} in {counted} steps, and the switch takes"
                    self._progress.warn(f"{words} {text.seconds(pause_s)}: the plan stays until one pays")
                self._unpaid = True
                return counted == left  # it never will
            announce(self._run_dir, len(self.replaced), job)
        except GppError as why:
            self._progress.warn(f"the plan stays: a better one cannot run ({why})")
            return True
        self._unpaid = False
        self._announced = _AnnouncedPlan(problem, found, slow, round(sum(sent.values())), moving_s, restart_s)
        return True

    def _first_restart_s(self, job: Job, problem: Problem) -> float:
        """Seconds in which the last worker takes its job and makes its program, before any has done so again.

        Processor seconds as at the start, since workers wait for each other there, at the speeds that devices have shown.
        """
        start = time.thread_time()
        _sent(type(job).load(self._run_dir), job, 0.0)
        read_s = time.thread_time() - start
        slower = {
            rank: self._machines.devices[device].speed_factor / problem.cluster.devices[device].speed_factor
            for rank, device in enumerate(self._devices)
        }
        best = min(slower.values())
        return max(factor / best * (read_s + self._built.get(rank, 0.0)) for rank, factor in slower.items())

    def _on_taken(self, taken: Taken) -> None:
        """All workers are under the plan that was announced."""
        announced, self._announced = self._announced, None
        assert announced is not None, "nothing else is taken"
        first, old = taken.job.settings.first_step, self.plan
        self._restart_s = max(0.0, taken.pause_s - announced.transfer_s)
        folder = self._run_dir / REPLACED / str(len(self.replaced))
        write_value(folder / "plan.json", old)
        self.plan, self.job = announced.found.plan, replace(taken.job, settings=self.job.settings)
        self.job.save(self._run_dir)
        shutil.rmtree(announced_at(self._run_dir, taken.number))
        self._passes.clear()
        self._dearer.clear()
        self._measure()
        switch = Switch(
            moved=changes(old, self.plan),
            bytes=taken.bytes,
            predicted_bytes=announced.bytes,
            pause_s=taken.pause_s,
            predicted_pause_s=announced.transfer_s + announced.restart_s,
            predicted_step_s=(announced.found.before_s, announced.found.after_s),
            samples_per_s=(self._samples_per_s(first - self._settings.every, first), None),
        )
        found = Replaced(
            first=first + 1, slow=announced.slow, stages=len(self.plan.stages), devices=self.plan.devices, switch=switch
        )
        self.replaced.append(found)
        self._progress.warn(str(found))
        self._recorder.know(plan=self.plan, predicted=self._experiment.strategy.predict(self.plan, announced.problem))

    def _samples_per_s(self, first: int, end: int) -> float | None:
        """The median rate of some steps; None where none was timed."""
        took = [self._took[step] for step in range(first, end) if step in self._took]
        return self.plan.minibatch_size / statistics.median(took) if took else None


def _sent(old: Job, new: Job, state_factor: float) -> dict[tuple[int, int], float]:
    """Bytes that go from each device to each other one."""
    from gpp.runtime.checkpoint.moves import moved_bytes, moves

    return moved_bytes(old, moves(old, new), state_factor)
