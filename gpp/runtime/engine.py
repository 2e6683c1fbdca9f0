"""What an engine promises: it runs a job and returns a timeline."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from gpp.errors import UnsupportedPlan

if TYPE_CHECKING:
    from gpp.plan.plan import Plan
    from gpp.planners.base import AbstractPlanner
    from gpp.runtime.job import Job
    from gpp.timeline import Emulation, Timeline, Versions

OnStep = Callable[[int, float | None, float | None], None]
"""(steps done, loss, samples per second); None for a value that is unknown."""

VERSIONS = "versions.json"
"""File in `ranks/` with the weight versions and the staleness of each stage, from an engine whose one process runs all stages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What an engine measured: None and empty for one that only simulates.

    Args:
        losses: of every step.
        terms: `loss:NAME` -> its value in every step, for a loss of several terms.
        evaluations: one {"step": steps done, name: value} for each evaluation.
        emulation: of emulated devices, how.
        versions: of an engine that trains without a timeline.
    """

    measured: Timeline | None = None
    losses: tuple[float, ...] = ()
    terms: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    evaluations: tuple[dict[str, Any], ...] = ()
    emulation: Emulation | None = None
    versions: Versions | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Called while a job runs.

    Args:
        on_terms: `loss:NAME` -> value of a step, right before `on_step` of that step; empty for a loss of one term.
        say: tells the user something that is theirs to do.
    """

    on_terms: Callable[[Mapping[str, float]], None] = field(default=lambda terms: None)
    on_step: OnStep = field(default=lambda step, loss, rate: None)
    on_evaluation: Callable[[dict[str, Any]], None] = field(default=lambda values: None)
    say: Callable[[str], None] = print


def refuse_what_does_not_run(plan: Plan) -> None:
    """Recomputation and tensor parallelism are planned and simulated only.

    Raises:
        UnsupportedPlan: the plan asks for one of them; names the stage.
    """
    for s, stage in enumerate(plan.stages):
        what = "tensor parallelism" if stage.tensor_parallel > 1 else "recomputation" if stage.recompute else None
        if what is not None:
            raise UnsupportedPlan(
                f"stage {s} asks for {what}, which is planned and simulated but cannot run yet. Fix: plan without it "
                "(strategy.planner.recompute=false, strategy.planner.tensor_parallel=false), or engine=emulate"
            )


def crowded(plan: Plan) -> tuple[str, ...]:
    """The warning for more workers than cores, if there are."""
    cores = len(os.sched_getaffinity(0))
    if plan.num_devices > cores:
        return (f"{plan.num_devices} workers share {cores} cores: measured times are not device times",)
    return ()


class AbstractEngine(ABC):
    """Runs plans. The settings of an engine are its fields."""

    name: str

    max_steps: int | None = None
    """At most so many steps are run, two at least; None for as many as the user asks for."""

    runs: ClassVar[bool] = True
    """Whether there is anything to execute."""
    own_runtime: ClassVar[bool] = False
    """Whether it walks the plan's program as it stands: pipelines that do not drain, clipping by the norm of a stage."""
    needs_weights: ClassVar[bool]
    """Whether it trains: the job must hold initial weights, hence a model that is really built, and there must be data."""
    planner: ClassVar[AbstractPlanner | None]
    """Cuts in place of the strategy's planner, for an engine that runs the user's own module whole; None for all others."""

    @property
    @abstractmethod
    def worker_settings(self) -> dict[str, Any]:
        """What the engine's own settings say to the workers: fields of `gpp.runtime.job.Settings`."""

    @abstractmethod
    def check(self, plan: Plan) -> tuple[str, ...]:
        """Warnings for the user; raises `UnsupportedPlan` for a plan that this engine cannot run."""

    @abstractmethod
    def execute(self, job: Job, run_dir: Path, progress: Progress) -> Outcome:
        """Run the job saved below `run_dir`.

        Raises:
            WorkerFailed: a worker died; its own traceback is in the error.
        """
