"""The best plan of a search so far, and the plans that were simulated on the way."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from gpp.plan.build import make_plan
from gpp.plan.plan import Plan
from gpp.planners.base import PlainPrediction, Predict
from gpp.planners.common.candidates import Assessor, Candidate, Parts
from gpp.planners.common.placement import Placement
from gpp.planners.search.timers import Timers

MARGIN = 1 - 1e-9
"""A candidate must be better than the best by more than rounding."""


class Incumbent:
    """The best plan so far, by predicted iteration time; ties go to the one that was tried first."""

    def __init__(self, assessor: Assessor, planner: str, predict: Predict) -> None:
        self.assessor, self.planner, self.predict = assessor, planner, predict
        self.best: Plan | None = None
        self.best_s = float("inf")
        self.num_simulated = 0
        self._seen: set[tuple[int, bool, Parts, Placement]] = set()
        self._by_size: dict[int, tuple[Plan | Candidate, float]] = {}
        self._timers = self.timers(assessor.cluster.num_devices)

    def timers(self, most_stages: int) -> Timers:
        """What times plans of at most so many stages, where that is the prediction."""
        return Timers(self.assessor.posed, most_stages, plain=isinstance(self.predict, PlainPrediction))

    def worth(self, bound_s: float) -> bool:
        """Whether a candidate that takes at least `bound_s` could still win."""
        return bound_s < self.best_s * MARGIN

    def simulate(self, candidate: Candidate, *, below_s: float | None = None) -> float | None:
        """A candidate's predicted seconds; None if it cannot win, or was tried before.

        Where compiled code says what the simulator would (`gpp.planners.search.timers`), nothing is simulated.

        Args:
            below_s: the seconds to beat; None for those of the best plan.
        """
        key = (candidate.microbatch_size, candidate.chain, candidate.parts, candidate.placement)
        beat = self.best_s if below_s is None else below_s
        if candidate.bound_s >= beat * MARGIN or key in self._seen:
            return None
        self._seen.add(key)
        self.num_simulated += 1
        b, found = candidate.microbatch_size, candidate
        seconds = self._timers.step_s(candidate.parts, candidate.placement, b, candidate.chain)
        if seconds is None or self.worth(seconds):
            found = self._plan(candidate)
            if seconds is None:
                seconds = self.predict(found).metrics.iteration_s
            elif isinstance(self.predict, PlainPrediction) and not self.predict.can_run(found):
                seconds = math.inf
            if seconds < self.best_s * MARGIN:
                self.best, self.best_s = found, seconds
        self._note(b, found, seconds)
        return seconds

    def _note(self, b: int, found: Plan | Candidate, seconds: float) -> None:
        """Keep what is the best of its micro-batch size."""
        if b not in self._by_size or seconds < self._by_size[b][1] * MARGIN:
            self._by_size[b] = found, seconds

    def _plan(self, candidate: Candidate) -> Plan:
        _, _, b, chain, parts, placement = candidate
        return make_plan(self.assessor.problem, self.planner, parts, b, chain=chain, ordered=True, placement=placement)

    def offer(self, plan: Plan) -> float:
        """Keep a plan from elsewhere if it is the best; returns its predicted seconds."""
        seconds = self.predict(plan).metrics.iteration_s
        self.num_simulated += 1
        if seconds < self.best_s * MARGIN:
            self.best, self.best_s = replace(plan, planner=self.planner, explanation=()), seconds
        return seconds

    def absorb(self, other: Incumbent) -> None:
        """Take over the findings of another search of the same problem, whose best plan is not lost."""
        self.num_simulated += other.num_simulated
        self._seen |= other._seen
        for b, (plan, seconds) in other._by_size.items():
            self._note(b, plan, seconds)
        if other.best_s < self.best_s * MARGIN:
            self.best, self.best_s = other.best, other.best_s

    def best_by_size(self) -> list[tuple[Plan, float]]:
        """The best plan of each micro-batch size and its seconds, best first."""
        out = list[tuple[Plan, float]]()
        for b in sorted(self._by_size, key=lambda b: (self._by_size[b][1], b)):
            found, seconds = self._by_size[b]
            plan = found if isinstance(found, Plan) else self._plan(found)
            self._by_size[b] = plan, seconds
            out.append((plan, seconds))
        return out

    def simulate_all(self, candidates: Sequence[Candidate], limit: int | None = None) -> None:
        """Simulate candidates by ascending bound until none can win.

        Args:
            limit: end after so many simulations without a better plan; None for no end.
        """
        left = limit
        for candidate in sorted(candidates):
            if not self.worth(candidate.bound_s) or left == 0:
                break
            before = self.best_s
            found = self.simulate(candidate)
            if found is not None and left is not None and found < math.inf:
                left = limit if self.best_s < before else left - 1
