"""A stream of requests on devices that may be lost, or slow: a new plan between two micro-batches, and the stream goes on.

Requests are numbered, and each can be made again from its number, so a request is kept until its answer is there. Where a device is
lost, or off its time (`gpp.runtime.replan`), the workers end, the strategy plans for what is left, and new workers begin with the
first request that is not answered. A request counts as answered once every worker has said that its part is done; what some worker
has written of later ones is written again to the same place. So no answer is lost, doubled, or out of order.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from gpp.errors import Infeasible, OffPace, WorkerFailed
from gpp.runtime.engines.distributed import Distributed
from gpp.runtime.replan import Pace, Replaced, Replan, at_speeds, without

if TYPE_CHECKING:
    from gpp.app.experiment import Experiment
    from gpp.app.recording import Recorder
    from gpp.cluster import Cluster
    from gpp.cost.problem import Problem
    from gpp.graph.captured import Captured
    from gpp.plan.plan import Plan
    from gpp.runtime.engine import Outcome, Progress
    from gpp.runtime.job import Job

REPLACED = "replaced"
"""Folder of the plans that were replaced, by number, each with what its workers wrote."""


def execute(experiment: Experiment, captured: Captured, problem: Problem, plan: Plan, job: Job, recorder: Recorder) -> Outcome:
    """Run a job saved in the recorder's directory; one that serves goes on with new plans, as often as `engine.replan` has it.

    Raises:
        InvalidConfig: the disk has no room for the answers.
        WorkerFailed: a worker failed of itself, or once too often.
        Infeasible: nothing fits on the devices that are left.
    """
    from gpp.runtime.serve.answers import check_room

    engine, progress, run_dir = experiment.engine, recorder.progress(), recorder.run_dir
    if engine.needs_weights:
        check_room(job, run_dir)
    settings = engine.replan if isinstance(engine, Distributed) else Replan()
    if job.settings.serving is None or not settings.most:
        return engine.execute(job, run_dir, progress)
    stream = _Stream(experiment, captured, problem, plan, job, progress)
    for number in range(settings.most):
        try:
            return stream.run(run_dir, settings)
        except (WorkerFailed, OffPace) as error:
            stream.replace_plan(error)
        _set_aside(run_dir, number)
        stream.job.save(run_dir)
        recorder.replaced(stream.plan, experiment.strategy.predict(stream.plan, stream.problem))
    return stream.run(run_dir, replace(settings, most=0))


class _Stream:
    """The state of a stream: what is answered, and under which plan it goes on."""

    def __init__(
        self, experiment: Experiment, captured: Captured, problem: Problem, plan: Plan, job: Job, progress: Progress
    ) -> None:
        self._experiment, self._captured, self._progress = experiment, captured, progress
        # Requests stay cut as they are: answers are then equal to the bit, whatever the plan.
        self.problem = replace(problem, microbatch_size=plan.stages[0].microbatch_size)
        self.plan, self.job = plan, job
        self.replaced: list[Replaced] = []
        self._answered = job.settings.first_step
        self._names = tuple(range(problem.cluster.num_devices))
        """What the user calls the devices that are left."""

    def run(self, run_dir: Path, settings: Replan) -> Outcome:
        """Answer what is left.

        Raises:
            OffPace: devices are off their time, and another plan is better then.
            WorkerFailed: as the engine has it.
        """
        on_pass = self._watched(settings) if settings.most else self._progress.on_pass
        progress = replace(self._progress, on_step=self._on_step, on_pass=on_pass)
        return replace(self._experiment.engine.execute(self.job, run_dir, progress), replaced=tuple(self.replaced))

    def _on_step(self, step: int, loss: float | None, rate: float | None) -> None:
        if step > self._answered:
            self._answered = step
            self._progress.on_step(step, loss, rate)

    def _watched(self, settings: Replan) -> Callable[[int, float], None]:
        """A function that is told of every pass, by the worker's rank."""
        pace = Pace(dict(enumerate(self._planned_s())), settings)

        def on_pass(rank: int, seconds: float) -> None:
            pace.note(rank, seconds)
            if off := pace.off():
                if self._plan_for(self._slowed(factors := pace.factors()))[1].stages != self.plan.stages:
                    raise OffPace(off, factors)
                pace.expect(factors)

        return on_pass

    @property
    def _devices(self) -> list[int]:
        """The device of each rank."""
        return sorted(self.plan.stages_of_device)

    def _planned_s(self) -> list[float]:
        """Seconds of a pass of each rank, as workers measure it: without what messages take."""
        bills, beside = self.plan.bills(self.problem), self.plan.beside_s(self.problem)
        stage_of = self.plan.stage_of_device
        return [bills[stage_of[device]].forward_s - beside[stage_of[device]][0] for device in self._devices]

    def _slowed(self, factors: dict[int, float]) -> Cluster:
        """The devices at the speeds that they have shown, by rank."""
        return at_speeds(self.problem.cluster, {self._devices[rank]: factor for rank, factor in factors.items()})

    def _plan_for(self, cluster: Cluster) -> tuple[Problem, Plan]:
        problem = replace(self.problem, cluster=cluster)
        return problem, self._experiment.strategy.plan(problem)

    def replace_plan(self, error: WorkerFailed | OffPace) -> None:
        """Take the plan for what is left.

        Raises:
            WorkerFailed: no device is gone, so that the same would happen again; or none is left.
            Infeasible: nothing fits any more.
        """
        lost, slow, names = set[int](), dict[int, float](), self._names
        if isinstance(error, OffPace):
            slow = {names[self._devices[rank]]: factor for rank, factor in error.off.items()}
            self.problem, self.plan = self._plan_for(self._slowed(error.factors))
        else:
            gone = {self._devices[rank] for rank in error.gone}
            if not gone or len(gone) == len(names):
                raise error
            lost = {names[device] for device in gone}
            cluster, kept = without(self.problem.cluster, gone)
            try:
                self.problem, self.plan = self._plan_for(cluster)
            except Infeasible as why:
                words = f"without device {', '.join(map(str, sorted(lost)))}, which is lost: {why.constraint}"
                raise Infeasible(words, why.remedy) from error
            self._names = tuple(names[device] for device in kept)
        job = self._experiment.job(self._captured, self.problem, self.plan)
        # Where all is answered, the last request is asked once more, for the workers' own end.
        first = min(self._answered, job.settings.steps - 1)
        self.job = replace(job, settings=replace(job.settings, first_step=first))
        found = Replaced(
            request=first + 1,
            lost=tuple(sorted(lost)),
            slow=slow,
            reason="" if isinstance(error, OffPace) else error.reason.splitlines()[0],
            stages=len(self.plan.stages),
            devices=self._names,
        )
        self.replaced.append(found)
        self._progress.warn(str(found))


def _set_aside(run_dir: Path, number: int) -> None:
    """Keep the plan that is replaced, and what its workers wrote."""
    folder = run_dir / REPLACED / str(number)
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy2(run_dir / "job" / "plan.json", folder / "plan.json")
    shutil.copytree(run_dir / "ranks", folder / "ranks", dirs_exist_ok=True)
