"""What an engine promises: it runs a job and returns a timeline."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from gpp.errors import UnsupportedPlan

if TYPE_CHECKING:
    from gpp.plan import Plan
    from gpp.runtime.job import Job
    from gpp.timeline import Timeline

OnStep = Callable[[int, float, float], None]
"""(steps done, loss, samples per second)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What an engine measured: None and empty for one that only simulates.

    Args:
        evaluations: one {"step": steps done, name: value} for each evaluation.
    """

    measured: Timeline | None = None
    losses: tuple[float, ...] = ()
    evaluations: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Called while a job runs.

    Args:
        say: tells the user something that he is to do.
    """

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
                "(strategy.planner.recompute=false, strategy.planner.tensor_parallel=false), or engine=simulate"
            )


class AbstractEngine(ABC):
    """Runs plans. The settings of an engine are its fields."""

    name: str

    needs_weights: ClassVar[bool]
    """Whether the job must hold initial weights, hence a model that is really built."""
    one_stage: ClassVar[bool]
    """Whether the engine runs the whole model on one device, whatever the strategy."""

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
