"""Several strategies on one problem: the facts of each as text and numbers, the same for terminal, page and result.json."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from gpp.analysis.comparison import Attempt, best_of
from gpp.plan.plan import Plan
from gpp.planners.bounds.lower_bound import Bound
from gpp.report import text
from gpp.report.figures import peak_memory
from gpp.report.result import optimality_gap, plan_dict
from gpp.timeline import Metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One strategy's line in the table.

    Args:
        relative: its iteration time over the best one's; None without a plan.
        bound: no plan of its kind is faster; None where none is known.
    """

    attempt: Attempt
    is_best: bool
    relative: float | None
    bound: Bound | None

    @property
    def gap(self) -> float | None:
        """No plan is more than this share faster; None without a plan, or where the bound does not speak of it."""
        return optimality_gap(self.attempt.plan, self.metrics, self.bound)

    @property
    def metrics(self) -> Metrics | None:
        """As predicted; None without a plan."""
        return self.attempt.predicted.metrics if self.attempt.predicted else None

    def cells(self) -> dict[str, str]:
        """Every column's text by its name."""
        attempt, plan, metrics = self.attempt, self.attempt.plan, self.metrics
        sizes = sorted({stage.microbatch_size for stage in plan.stages}) if plan else []
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
            "b": ", ".join(map(str, sizes)) or "–",
            "search": text.seconds(attempt.search_s),
            "own objective": text.seconds(attempt.objective_s) if attempt.objective_s else attempt.objective or "–",
            "gap ≤": text.percent(self.gap),
            "status": attempt.status,
        }


def lines(attempts: Sequence[Attempt], bound: Bound | None) -> list[Line]:
    """A line for every strategy, in their order."""
    best = best_of(attempts)
    out = []
    for attempt in attempts:
        metrics = attempt.predicted.metrics if attempt.predicted else None
        relative = text.quotient(metrics.iteration_s, best.iteration_s) if metrics and best else None
        own = bound if attempt.drains else None
        out.append(Line(attempt=attempt, is_best=attempt is best, relative=relative, bound=own))
    return out


def compared_dicts(attempts: Sequence[Attempt], bound: Bound | None, num_ops: int | None) -> list[dict[str, Any]]:
    """result.json's `compared`: the parts of a run's result for every strategy, and its time over the best one's."""
    out = []
    for line in lines(attempts, bound):
        attempt, metrics = line.attempt, line.metrics
        out.append(
            {
                "strategy": attempt.strategy,
                "status": attempt.status,
                "reason": attempt.reason,
                "plan": None if attempt.plan is None else plan_dict(attempt.plan, num_ops, metrics, line.bound),
                "predicted": None if metrics is None else asdict(metrics),
                "relative_to_best": line.relative,
                "objective": attempt.objective,
                "objective_s": attempt.objective_s,
                "search_s": attempt.search_s,
            }
        )
    return out


def columns(found: Sequence[Line]) -> list[str]:
    """The cells that say something about any of them, by name."""
    empty = set() if any(line.attempt.objective for line in found) else {"own objective"}
    empty |= set() if any(not line.attempt.drains for line in found) else {"stale"}
    return [name for name in found[0].cells() if name not in empty]


def reason_lines(attempts: Sequence[Attempt]) -> list[str]:
    """Why some strategies have no plan, one line each."""
    return [f"{a.strategy}: {a.status}: {(a.reason or 'no reason given').splitlines()[0]}" for a in attempts if a.status != "ok"]


def certificate(plan: Plan | None, predicted: Metrics | None, bound: Bound | None) -> str:
    """How far from optimal the plan can be, in words; empty where nothing is known."""
    if plan is None or bound is None:
        return ""
    if not bound.covers(plan):
        least = text.seconds(bound.iteration_s)
        return f"no bound is known for plans that recompute or split operators; others take {least} at least"
    gap = optimality_gap(plan, predicted, bound)
    return (
        ""
        if gap is None
        else f"at most {text.percent(gap)} from optimal (bound {text.seconds(bound.iteration_s)}: {bound.binding})"
    )
