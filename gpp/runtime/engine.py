"""Contract of an engine: it runs a job and returns a timeline."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import Field

from gpp.errors import InvalidConfig, UnsupportedPlan
from gpp.runtime.task import EngineTask
from gpp.settings import LARGEST, Count

if TYPE_CHECKING:
    from gpp.cluster import Cluster
    from gpp.optimizers import AbstractOptimizer
    from gpp.plan.plan import Plan
    from gpp.planners.base import AbstractPlanner
    from gpp.runtime.job import Job
    from gpp.schedules.base import AbstractSchedule
    from gpp.timeline import Outcome
    from gpp.weights.base import AbstractWeights

OnStep = Callable[[int, float | None, float | None], None]
"""(steps done, loss, samples per second); None for a value that is unknown."""

GRADIENT_NORM = "gradient_norm"
"""Name of the norm of all gradients in the records of steps."""

VERSIONS = "versions.json"
"""File in `ranks/` with the weight versions and the staleness of each stage, where one process runs all stages."""


class Taken(NamedTuple):
    """Workers have gone on under another plan.

    Args:
        number: of the plan, counted from the first that replaced another.
        job: of it, from its first step on.
        pause_s: from when the last of them had come to the boundary until all had their programs.
        bytes: that were sent between them.
    """

    number: int
    job: Job
    pause_s: float
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Called while a job runs.

    Args:
        on_terms: values of a step, right before `on_step` of that step: `loss:NAME` where the loss has several terms, and
            `gradient_norm` where it was taken.
        on_pass: (rank, seconds) of the passes of a worker whose plan may be replaced: of a step, or the mean of a request; may
            raise, which ends the workers.
        on_built: (rank, processor seconds) that such a worker took to make its program and stages.
        on_taken: told when all workers have taken another plan.
        say: gives the user an instruction.
        warn: warns the user of what the workers have found.
    """

    on_terms: Callable[[Mapping[str, float]], None] = field(default=lambda terms: None)
    on_step: OnStep = field(default=lambda step, loss, rate: None)
    on_evaluation: Callable[[dict[str, Any]], None] = field(default=lambda values: None)
    on_pass: Callable[[int, float], None] = field(default=lambda rank, seconds: None)
    on_built: Callable[[int, float], None] = field(default=lambda rank, seconds: None)
    on_taken: Callable[[Taken], None] = field(default=lambda taken: None)
    say: Callable[[str], None] = print
    warn: Callable[[str], None] = field(default=lambda words: print(f"warning: {words}"))


def task_of(job: Job) -> EngineTask:
    """What an engine asks beside the plan of a job."""
    clips, of = job.settings.optimizer.get("clip_norm") is not None, job.settings
    return EngineTask.of(job.captured, job.graph, clips=clips, kind=of.device_kind, whole_ops=of.whole_ops)


def refuse_policies(plan: Plan) -> None:
    """Refuse what stages ask for beyond plain passes, for an engine that runs these alone.

    Raises:
        UnsupportedPlan: names the stage, and what it asks for.
    """
    for s, stage in enumerate(plan.stages):
        for what, fix in filter(None, (value.lacking for value in stage.mechanisms)):
            raise UnsupportedPlan(f"stage {s} asks for {what}, which this engine does not do. Fix: {fix}, or engine=distributed")


def refuse_split_operators(plan: Plan, engine: str) -> None:
    """Refuse replicas that are several devices, for an engine that runs every operator whole.

    Raises:
        UnsupportedPlan: the plan asks for it; names the stage.
    """
    for s, stage in enumerate(plan.stages):
        if (t := stage.devices_per_replica) > 1:
            raise UnsupportedPlan(
                f"stage {s} splits its operators over {t} devices, and {engine} runs every operator whole. Fix: plan without it "
                f"({stage.unshared}), or engine=distributed"
            )


def crowded(plan: Plan) -> tuple[str, ...]:
    """Warning for more workers than cores, if there are."""
    cores = len(os.sched_getaffinity(0))
    if plan.num_devices > cores:
        return (f"{plan.num_devices} workers share {cores} cores, and the prediction lets them",)
    return ()


class AbstractEngine(ABC):
    """Runs plans. The settings of an engine are its fields."""

    name: str

    max_steps: int | None = None
    """Most steps to run, at least two; None for as many as the user asks for."""

    runs: ClassVar[bool] = True
    """Whether the engine executes a job."""
    own_runtime: ClassVar[bool] = False
    """Whether the engine runs the plan's own program: pipelines that do not drain and clipping by stage need that."""
    own_weights: ClassVar[bool] = False
    """Whether its workers can make the initial weights of their stages by themselves (`gpp.runtime.checkpoint.origin`)."""
    bounds_memory: ClassVar[bool] = False
    """Whether it has the setting `enforce_memory`: its workers can be bound to the memory of their devices."""
    needs_weights: ClassVar[bool]
    """Whether the engine trains: the job then holds initial weights of a really built model, and there is data."""
    overwrites: ClassVar[bool] = True
    """Whether a backward that is to use other weights than its forward finds them in the forward's memory."""
    planner: ClassVar[AbstractPlanner | None] = None
    """Planner in place of the strategy's, for an engine that runs the user's own module whole; None for all others."""

    @property
    def worker_settings(self) -> dict[str, Any]:
        """Fields of `gpp.runtime.job.Settings` that the engine's own settings decide."""
        return {}

    def devices_here(self, cluster: Cluster) -> int:
        """Devices of the cluster that workers on this machine compute on; 0 for an engine that uses none."""
        return 0

    def refuse_settings(self, weights: AbstractWeights, optimizer: AbstractOptimizer, schedule: AbstractSchedule) -> None:
        """Refuse what only the project's own runtime supports, in any other.

        Raises:
            InvalidConfig: names the setting.
        """
        if self.own_runtime:
            return
        if not weights.flushes:
            rule = f"engine={self.name} drains its pipeline before every update"
            raise InvalidConfig("strategy.weights", weights.name, rule, "use engine=distributed, reference, emulate or simulate")
        if schedule.holds.parts:
            rule = f"engine={self.name} runs backwards whole"
            fix = "set strategy/schedule=1f1b, or use engine=distributed, emulate or simulate"
            raise InvalidConfig("strategy.schedule", schedule.name, rule, fix)
        if schedule.per_device > 1 and self.planner is not None:
            rule = f"engine={self.name} runs the model in one piece, and there are {schedule.per_device} stages for each device"
            raise InvalidConfig("strategy.schedule", schedule.name, rule, "leave strategy/schedule out, or use engine=distributed")
        if optimizer.log_gradient_norm:
            rule = f"engine={self.name} does not say the norm"
            fix = "set optimizer.log_gradient_norm=false, or use engine=distributed"
            raise InvalidConfig("optimizer.log_gradient_norm", True, rule, fix)
        if optimizer.clip_norm is not None and optimizer.clip_scope == "stage":
            rule = f"engine={self.name} clips by the norm of the whole model"
            raise InvalidConfig("optimizer.clip_scope", "stage", rule, "set optimizer.clip_scope=model, or use engine=distributed")

    def check(self, plan: Plan) -> tuple[str, ...]:
        """Warnings for the user; raises `UnsupportedPlan` for a plan that this engine cannot run."""
        return ()

    @property
    def rehearses(self) -> bool:
        """Whether plans can be timed in place: the project's own workers run them, and this process starts them."""
        return False

    def refuse_plan(self, plan: Plan, task: EngineTask) -> None:
        """Refuse a plan that this engine can never run, whatever the machine; an engine may have nothing to refuse.

        Planners that plan for the engine are asked with it, so that no plan of theirs is refused when it is to run.

        Raises:
            UnsupportedPlan: names the stage or the number that is in the way.
        """
        return

    def limits(self, task: EngineTask) -> Callable[[Plan], str | None]:
        """`refuse_plan` as a question: why the engine cannot run a plan; None if it can."""

        def why_not(plan: Plan) -> str | None:
            try:
                self.refuse_plan(plan, task)
            except UnsupportedPlan as error:
                return str(error)
            return None

        return why_not

    @property
    def joins(self) -> bool:
        """Whether a run goes on with what another command's workers left in its directory."""
        return False

    def refuse(self, job: Job) -> None:
        """Refuse a job that this engine cannot run, before a file of it is written; an engine may have nothing to refuse.

        Raises:
            InvalidConfig, UnsupportedPlan: names the setting or the stage.
        """
        return

    @abstractmethod
    def execute(self, job: Job, run_dir: Path, progress: Progress) -> Outcome:
        """Run the job saved below `run_dir`.

        Raises:
            WorkerFailed: a worker died; its own traceback is in the error.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class AbstractServer(AbstractEngine):
    """An engine that runs streams of requests, too.

    Args:
        buffers: messages for which every input and output edge of a stage has room while requests are served; a sender waits for
            a full one.
        arrival_rate: requests per second; None: another one always waits.
        arrivals: how far apart requests are: all equally far, or at random (`poisson`), by the run's seed.
        answers: whether the answers are written to answers.safetensors.
    """

    buffers: Count = 2
    arrival_rate: Annotated[float, Field(gt=0, ge=1e-9, le=LARGEST)] | None = None
    arrivals: Literal["deterministic", "poisson"] = "deterministic"
    answers: bool = True
