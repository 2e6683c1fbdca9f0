"""The settings of workers that answer requests."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar, Literal, final

from pydantic import Field

from gpp.mechanisms.serving.requests import Arrivals
from gpp.runtime.job import Job
from gpp.runtime.job_course import AbstractJobCourse
from gpp.settings import Count, Natural


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSettings(AbstractJobCourse):
    """What a job that serves requests adds to the settings of a run, whose `steps` are the requests.

    Args:
        buffers, arrivals: messages for which an edge has room; when requests come.
        split, samples: of the data set whose samples the requests are made of, in order, again and again.
        answers, kept: whether they are written; numbers by name that mechanisms keep to (`AbstractJobPart.kept`).
    """

    name: ClassVar[str] = "serving"
    buffers: Count
    arrivals: Arrivals
    split: Literal["train", "test"] = "test"
    samples: Natural = 0
    answers: bool = True
    kept: Annotated[dict[str, int | float], Field(exclude_if=lambda found: not found)] = field(default_factory=dict)

    def short(self, steps: int, rate: float | None) -> ServeSettings:
        return replace(self, arrivals=Arrivals(requests=steps, rate=rate), answers=False)

    def words(self, step: int) -> str:
        return "a request of the warm-up" if step < 0 else f"request {step}"


COURSE = ServeSettings


def serving_of_job(job: Job) -> ServeSettings:
    """The settings of a job that serves requests."""
    assert isinstance(job.settings.course, ServeSettings), "the job serves requests"
    return job.settings.course
