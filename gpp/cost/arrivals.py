"""The arrivals of a stream's requests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np


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
