"""The facts of several strategies on one problem, as text and numbers: the same for terminal, page and result.json."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from gpp.analysis.comparison import Attempt, best_of
from gpp.analysis.max_batch import LargestMicrobatch
from gpp.plan.plan import Objective
from gpp.planners.bounds.lower_bound import Bound
from gpp.report.draw import text
from gpp.report.draw.stage_graph import microbatch_words
from gpp.report.run.result import optimality_gap, peak_memory, plan_dict
from gpp.timeline import Metrics

WORDS = ("strategy", "status")
"""Columns that hold words; the others hold numbers."""
MEANINGS = {
    "× best": "time of a sample over the best strategy's of the same kind, synchronous or asynchronous",
    "bubble": "the share of their time in which devices run no pass",
    "memory": "of the fullest device",
    "stale": "updates between the weights of a forward and the update that applies its gradient; 0 is what one device computes",
    "b": "samples of a micro-batch",
    "search": "time of planning",
    "own objective": "what the planner itself minimises; all other figures come from one simulator for all",
    "gap ≤": "how much slower than the best possible plan at most, or than the best in which no device holds several stages",
}
"""What columns mean whose names do not say it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyLine:
    """One strategy's line in the table.

    Args:
        is_best: among those of its kind: pipelines that drain before every update, or those that do not.
        relative: time of a sample over the best one's of its kind; None without a plan.
        bound: a time that no plan of its kind can beat; None where none is known.
    """

    attempt: Attempt
    is_best: bool
    relative: float | None
    bound: Bound | None

    @property
    def gap(self) -> float | None:
        """The share by which the plan is slower than the bound; None without a plan or without a bound for it."""
        return optimality_gap(self.attempt.plan, self.metrics, self.bound)

    @property
    def metrics(self) -> Metrics | None:
        """The prediction; None without a plan."""
        return self.attempt.predicted.metrics if self.attempt.predicted else None

    @property
    def objective(self) -> Objective | None:
        """The value that the planner minimised; None without a plan, or where it minimised the prediction itself."""
        return self.attempt.plan.objective if self.attempt.plan else None

    def cells(self) -> dict[str, str]:
        """Every column's text by its name."""
        attempt, plan, metrics, objective = self.attempt, self.attempt.plan, self.metrics, self.objective
        return {
            "strategy": attempt.strategy,
            "predicted": text.seconds(metrics.iteration_s) if metrics else "–",
            "samples/s": text.significant(metrics.throughput_samples_per_s) if metrics else "–",
            "× best": text.ratio(self.relative),
            "bubble": text.percent(metrics.bubble_fraction) if metrics else "–",
            "memory": text.num_bytes(peak_memory(metrics)),
            "stale": str(max(metrics.staleness.values(), default=0)) if metrics else "–",
            "stages": str(len(plan.stages)) if plan else "–",
            "depth": str(plan.depth) if plan else "–",
            "devices": str(plan.num_devices) if plan else "–",
            "b": microbatch_words(plan) if plan else "–",
            "search": text.seconds(attempt.search_s),
            "own objective": text.seconds(objective.value_s) if objective else "–",
            "gap ≤": text.percent(self.gap),
            "status": attempt.status,
        }


def strategy_lines(attempts: Sequence[Attempt], bound: Bound | None) -> list[StrategyLine]:
    """A line for every strategy, in their order."""
    best = best_of(attempts)
    out = []
    for attempt in attempts:
        metrics = attempt.predicted.metrics if attempt.predicted else None
        of_kind = best.of_kind(attempt)
        relative = text.quotient(attempt.sample_s, of_kind.sample_s) if metrics and of_kind else None
        own = None if attempt.unbounded else bound
        out.append(StrategyLine(attempt=attempt, is_best=attempt is of_kind, relative=relative, bound=own))
    return out


def best_names(attempts: Sequence[Attempt]) -> dict[str, str | None]:
    """result.json's `best`: the name of the best strategy of each kind; None where no strategy of the kind has a plan."""
    return {kind: attempt and attempt.strategy for kind, attempt in best_of(attempts)._asdict().items()}


def best_lines(found: Sequence[StrategyLine]) -> list[tuple[str, StrategyLine]]:
    """The best line of each kind, with words for it: no kind is named where all are of one."""
    best = sorted((line for line in found if line.is_best), key=lambda line: not line.attempt.drains)
    kinds = {line.attempt.drains for line in found}
    words = {True: "best synchronous", False: "best asynchronous"} if len(kinds) > 1 else dict.fromkeys(kinds, "best")
    return [(words[line.attempt.drains], line) for line in best]


def same_plans(found: Sequence[StrategyLine]) -> list[list[StrategyLine]]:
    """The lines in groups of the same plan with the same predicted events; strategies without a plan stand alone."""
    out: list[list[StrategyLine]] = []
    for line in found:
        group = next((group for group in out if _same(group[0].attempt, line.attempt)), None)
        if group is None:
            out.append([line])
        else:
            group.append(line)
    return out


def _same(a: Attempt, b: Attempt) -> bool:
    """Whether two strategies do the same; how they found their plans does not count."""
    if a.plan is None or b.plan is None or a.predicted is None or b.predicted is None:
        return False
    found = {"planner": "", "search_s": 0.0, "objective": None, "explanation": ()}
    return replace(a.plan, **found) == replace(b.plan, **found) and a.predicted.events == b.predicted.events


def compared_dicts(attempts: Sequence[Attempt], bound: Bound | None, num_ops: int | None) -> list[dict[str, Any]]:
    """result.json's `compared`: the parts of a run's result for every strategy, and its time over the best one's of its kind."""
    out = []
    for line in strategy_lines(attempts, bound):
        attempt, metrics = line.attempt, line.metrics
        out.append(
            {
                "strategy": attempt.strategy,
                "synchronous": attempt.drains,
                "status": attempt.status,
                "reason": attempt.reason,
                "plan": None if attempt.plan is None else plan_dict(attempt.plan, num_ops, metrics, line.bound),
                "predicted": None if metrics is None else asdict(metrics),
                "relative_to_best": line.relative,
                "objective": str(line.objective) if line.objective else None,
                "objective_s": line.objective.value_s if line.objective else None,
                "search_s": attempt.search_s,
            }
        )
    return out


def boundary_dicts(boundaries: Sequence[LargestMicrobatch]) -> list[dict[str, Any]]:
    """result.json's `max_batch`: for every strategy the largest sizes, what was tried, and what real workers said."""
    return [
        {
            "strategy": boundary.strategy,
            "microbatch_size": boundary.microbatch_size or None,
            "microbatches": boundary.microbatches,
            "minibatch_size": boundary.microbatch_size * boundary.microbatches or None,
            "refused": boundary.beyond,
            "reason": boundary.reason,
            "throughput_samples_per_s": metrics and metrics.throughput_samples_per_s,
            "tried": [{"microbatch_size": size, "fits": fits} for size, fits in boundary.tried],
            "confirmed": boundary.confirmed and {**asdict(boundary.confirmed), "holds": boundary.confirmed.holds},
        }
        for boundary in boundaries
        for metrics in [boundary.best.predicted and boundary.best.predicted.metrics]
    ]


def columns(found: Sequence[StrategyLine]) -> list[str]:
    """Names of the columns that say something about at least one strategy."""
    empty = set() if any(line.objective for line in found) else {"own objective"}
    empty |= set() if any(not line.attempt.drains for line in found) else {"stale"}
    empty |= set() if any(line.gap is not None for line in found) else {"gap ≤"}
    return [name for name in found[0].cells() if name not in empty]


def legend(names: Sequence[str]) -> str:
    """What the columns of these names mean."""
    return " ".join(f"{name}: {MEANINGS[name]}." for name in names if name in MEANINGS)


def reason_lines(attempts: Sequence[Attempt]) -> list[str]:
    """A line for each strategy without a plan: its status and the reason."""
    return [f"{a.strategy}: {a.status}: {(a.reason or 'no reason given').splitlines()[0]}" for a in attempts if a.status != "ok"]
