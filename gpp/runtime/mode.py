"""Modes of a run that mechanisms add: what a run does in place of a training, from its settings on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from gpp.cluster import Cluster
from gpp.cost.problem import Problem
from gpp.data.base import AbstractData
from gpp.graph.captured import Captured
from gpp.mechanism import found, parts
from gpp.models.base import AbstractModel
from gpp.runtime.checkpoint.resume import Checkpoints
from gpp.runtime.engine import AbstractEngine, Progress
from gpp.runtime.job import Job
from gpp.strategy import Strategy

if TYPE_CHECKING:
    from gpp.runtime.worker.seat import Seat
    from gpp.timeline import Outcome


class RunSettings(Protocol):
    """What of a run's settings its refusals read; `gpp.app.experiment.Experiment` has them all."""

    @property
    def mode(self) -> str: ...
    @property
    def engine(self) -> AbstractEngine: ...
    @property
    def strategy(self) -> Strategy: ...
    @property
    def strategies(self) -> Sequence[Strategy]: ...
    @property
    def cluster(self) -> Cluster: ...
    @property
    def plan(self) -> str | None: ...
    @property
    def checkpoint(self) -> Checkpoints: ...
    @property
    def resume(self) -> str | None: ...
    @property
    def load_weights(self) -> str | None: ...
    @property
    def loss_scope(self) -> str: ...
    @property
    def num_steps(self) -> int: ...
    @property
    def seed(self) -> int: ...


class AbstractMode(ABC):
    """A mode in which nothing is trained."""

    name: ClassVar[str]
    """What `mode` on the command line says."""

    @abstractmethod
    def check(self, e: RunSettings) -> None:
        """Refuse settings that the mode cannot follow, in a run of another mode those that are for this one alone.

        Raises:
            InvalidConfig: names the setting.
        """

    @abstractmethod
    def adapted(self, strategy: Strategy) -> Strategy:
        """The strategy with forwards only.

        Raises:
            InvalidConfig: a part of it was asked for that says what backwards do.
        """

    @abstractmethod
    def model(self, captured: Captured) -> Captured:
        """The part of a captured model that runs."""

    @abstractmethod
    def posed(self, e: RunSettings, sizes: Mapping[str, int], problem: Problem) -> Problem:
        """The problem of a training under the mode's regime.

        Args:
            sizes: samples of each split of the data.
        """

    @abstractmethod
    def judged(
        self, e: RunSettings, whole: Captured, data: AbstractData, model: AbstractModel, job: Job, run_dir: Path
    ) -> dict[str, float]:
        """The quality of what the run has made, by the data's targets; empty where it has made nothing.

        Args:
            whole: the model with its loss.
        """


def check_modes(e: RunSettings) -> None:
    """Refuse settings that do not go with the run's mode, as the modes of mechanisms have it.

    Raises:
        InvalidConfig: names the setting.
    """
    for mode in found("mode", "MODE", AbstractMode).values():
        mode.check(e)


def mode_named(name: str) -> AbstractMode | None:
    """The mode of that name, if a mechanism adds it."""
    return next((mode for mode in found("mode", "MODE", AbstractMode).values() if mode.name == name), None)


class AbstractCourseRun(ABC):
    """The workers of one mechanism's course."""

    @abstractmethod
    def check_room(self, job: Job, run_dir: Path) -> None:
        """Refuse a run for whose results the disk has no room.

        Raises:
            InvalidConfig: says how much is free.
        """

    @abstractmethod
    def finish(self, run_dir: Path) -> tuple[Mapping[str, int] | None, str]:
        """Give the files their names when all workers have ended, whatever has ended them.

        Returns:
            Counts of what is there, for result.json, and a warning, empty where nothing is missing.
        """

    @abstractmethod
    def execute(self, job: Job, run_dir: Path, progress: Progress, *, emulated: bool = False) -> Outcome:
        """Run the workers, and collect what they have measured; emulated devices in seconds of the cluster.

        Raises:
            WorkerFailed: a worker died; its own traceback is in the error.
        """

    @abstractmethod
    def rehearse(self, job: Job, run_dir: Path, seat: Seat, log: Callable[[dict[str, Any]], None]) -> Sequence[dict[str, Any]]:
        """Do it all as one worker; the records of all repetitions, with their events.

        Args:
            log: gets a record of each when it is over.
        """


def course_run(job: Job) -> AbstractCourseRun | None:
    """How the job's course runs; None for a job that trains."""
    course = job.settings.course
    return None if course is None else parts((course.mechanism,), "run", "RUN", AbstractCourseRun)[0]
