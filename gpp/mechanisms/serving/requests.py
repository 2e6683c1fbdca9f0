"""A stream of requests, as problems have it: when they come, and the room of the edges."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal, final

import numpy as np

from gpp.cost.problem import Problem
from gpp.cost.regime import AbstractCourse


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
class Requests(AbstractCourse):
    """The requests that a pipeline answers.

    Args:
        arrivals: when they come.
    """

    mechanism: ClassVar[str] = "serving"
    buffers: int
    writes: bool = False
    arrivals: Arrivals = field(default_factory=Arrivals)

    @property
    def rate(self) -> float | None:
        return self.arrivals.rate


def requests_of(problem: Problem) -> Requests:
    """The requests of a problem of serving."""
    assert isinstance(problem.regime.course, Requests), "the problem is one of serving"
    return problem.regime.course
