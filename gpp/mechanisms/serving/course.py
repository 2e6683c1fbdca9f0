"""A stream of requests: when they come, the room of the edges, and what workers answer with."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, final

import numpy as np

from gpp.cost.regime import AbstractCourse
from gpp.runtime.job_asked import AbstractJobCourse
from gpp.settings import Count, Natural


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """A stream of requests.

    Args:
        requests: how many come.
        rate: requests per second; None where another one always waits, so that the pipeline is saturated.
        spacing: `deterministic`, all equally far apart, or `poisson`.
        seed: the seed of the random times.
    """

    requests: int = 64
    rate: float | None = None
    spacing: Literal["deterministic", "poisson"] = "deterministic"
    seed: int = 0

    def times_s(self) -> list[float]:
        """[requests] seconds from the start of the stream at which each request comes, the first at 0; all 0 without a rate."""
        if self.rate is None:
            return [0.0] * self.requests
        if self.spacing == "deterministic":
            return [number / self.rate for number in range(self.requests)]
        gaps = np.random.default_rng(self.seed).exponential(1.0 / self.rate, self.requests - 1)
        return [0.0, *np.cumsum(gaps).tolist()]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Requests(AbstractJobCourse):
    """The requests that a pipeline answers: of a problem, and of a job, whose `steps` they are.

    Args:
        buffers, arrivals: messages for which an edge has room; when requests come.
        split, samples: of the data set whose samples the requests of a job are made of, in order, again and again.
        answers: whether they are written.
    """

    mechanism: ClassVar[str] = "serving"
    buffers: Count
    arrivals: Arrivals = field(default_factory=Arrivals)
    split: Literal["train", "test"] = "test"
    samples: Natural = 0
    answers: bool = False

    @property
    def rate(self) -> float | None:
        return self.arrivals.rate

    @property
    def writes(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]  (frozen: nobody sets it)
        return self.answers

    def short(self, steps: int, rate: float | None) -> Requests:
        return replace(self, arrivals=Arrivals(requests=steps, rate=rate), answers=False)

    def words(self, step: int) -> str:
        return "a request of the warm-up" if step < 0 else f"request {step}"


COURSE = Requests


def requests_of(course: AbstractCourse | None) -> Requests:
    """The course of a problem or of a job that is known to serve requests."""
    assert isinstance(course, Requests), "requests are served"
    return course
