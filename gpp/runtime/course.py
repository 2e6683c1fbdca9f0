"""How engines run the course of a job: the workers that a mechanism has in place of those that train, and their results."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from gpp.mechanism import parts
from gpp.runtime.job import Job

if TYPE_CHECKING:
    from gpp.runtime.worker.seat import Seat
    from gpp.timeline import Outcome


class AbstractCourseRun(ABC):
    """The workers of one mechanism's course, each a module whose `main` is a worker's whole process."""

    workers: ClassVar[str]
    emulated: ClassVar[str]
    """Those of `engine=emulate`."""

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
    def collect(
        self, job: Job, run_dir: Path, starts: dict[int, float], ends: dict[int, float], *, emulated: bool = False
    ) -> Outcome:
        """What workers have measured; emulated devices in seconds of the cluster.

        Args:
            starts, ends: of each repetition of the program, by number.
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
    return None if course is None else parts((course.name,), "run", "RUN", AbstractCourseRun)[0]
