"""The key figures of a run, the same for the page and the terminal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpp.plan.plan import Plan
from gpp.planners.bounds.lower_bound import Bound
from gpp.report.draw import text
from gpp.report.run.record import RunRecord
from gpp.report.run.result import optimality_gap, peak_memory
from gpp.timeline import Metrics

if TYPE_CHECKING:
    from gpp.report.run.strategies import StrategyLine

WORTH_SAYING = 0.03
"""An emulated step that is longer than its virtual time by this share comes with advice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyFigure:
    """One key figure, predicted beside measured; `ratio` is measured / predicted."""

    name: str
    predicted: float | None
    measured: float | None
    unit: str  # seconds, percent, bytes, rate

    @property
    def ratio(self) -> float | None:
        return text.quotient(self.measured, self.predicted)

    def show(self, value: float | None) -> str:
        """A value of this figure as text."""
        if self.unit == "rate":
            return "–" if value is None else f"{text.significant(value)} /s"
        return {"seconds": text.seconds, "percent": text.percent, "bytes": text.num_bytes}[self.unit](value)


def key_figures(predicted: Metrics | None, measured: Metrics | None) -> tuple[KeyFigure, ...]:
    """Iteration time, throughput, latencies where nothing is trained, bubble, peak memory and communication."""

    def of(name: str, metrics: Metrics | None) -> float | None:
        return None if metrics is None else getattr(metrics, name)

    def figure(name: str, attribute: str, unit: str) -> KeyFigure:
        return KeyFigure(name=name, predicted=of(attribute, predicted), measured=of(attribute, measured), unit=unit)

    own, real = predicted and predicted.course, measured and measured.course  # of a pipeline that trains nothing
    known = own or real
    course = [
        KeyFigure(name=name, predicted=own and getattr(own, attribute), measured=real and getattr(real, attribute), unit=unit)
        for name, attribute, unit in (known.figures if known else ())
    ]
    return (
        figure(f"time per {known.one}" if known else "iteration time", "iteration_s", "seconds"),
        figure("throughput, samples", "throughput_samples_per_s", "rate"),
        *course,
        *_of_spread(predicted, measured),
        figure("bubble", "bubble_fraction", "percent"),
        KeyFigure(name="peak memory", predicted=peak_memory(predicted), measured=peak_memory(measured), unit="bytes"),
        figure(f"communication per {known.one if known else 'step'}", "communication_bytes", "bytes"),
    )


def _of_spread(predicted: Metrics | None, measured: Metrics | None) -> tuple[KeyFigure, ...]:
    """The time within which most steps end, where they differ; none where that is not known."""
    own, real = predicted and predicted.spread, measured and measured.spread
    known = own or real
    if known is None:
        return ()
    name = f"{text.percent(known.quantile)} of the steps within"
    return (KeyFigure(name=name, predicted=own and own.tail_s, measured=real and real.tail_s, unit="seconds"),)


def run_figures(run: RunRecord) -> tuple[KeyFigure, ...]:
    """The key figures of a run."""
    return key_figures(*(timeline and timeline.metrics for timeline in (run.predicted, run.measured)))


def certificate(plan: Plan | None, predicted: Metrics | None, bound: Bound | None) -> str:
    """The plan's largest possible distance from the optimum, in words; empty where nothing is known."""
    if plan is None or bound is None:
        return ""
    found = bound.of(plan)
    if found is None:
        least = text.seconds(bound.iteration_s)
        return f"no bound is known for plans that recompute or split operators; other plans take at least {least}"
    gap = optimality_gap(plan, predicted, bound)
    if gap is None:
        return ""
    # The bound of a plan that shares devices holds for all others, too.
    kind = "" if plan.shares_devices else " if no device holds several stages"
    return f"at most {text.percent(gap)} from optimal (bound {text.seconds(found.iteration_s)}{kind}: {found.binding})"


def worth_words(run: RunRecord, bound: Bound | None) -> str:
    """The certificate of a run's plan, or why it has none; `bound` as `certificate` has it."""
    return _worth(certificate(run.plan, run.predicted.metrics if run.predicted else None, bound), run)


def line_worth_words(run: RunRecord, line: StrategyLine) -> str:
    """The same of the plan of a comparison's line."""
    return _worth(certificate(line.attempt.plan, line.metrics, line.bound), run, line.attempt.unbounded)


def _worth(known: str, run: RunRecord, *unbounded: str) -> str:
    return known or next((f"no bound is known for {kind}" for kind in (run.judged.unbounded, *unbounded) if kind), "")


def emulation_words(run: RunRecord) -> str:
    """A sentence on how the step of an emulated run was measured; empty for other runs."""
    found = run.outcome.emulation
    if found is None:
        return ""
    spread = " to ".join(dict.fromkeys(text.seconds(f(found.step_s)) for f in (min, max)))
    longer = (text.quotient(run.measured.metrics.iteration_s if run.measured else None, found.virtual_iteration_s) or 1.0) - 1.0
    more = f", {text.percent(longer)} longer than that: a larger engine.budget_s makes it less" if longer > WORTH_SAYING else ""
    return (
        f"Emulated: by the virtual clock a step takes {text.seconds(found.virtual_iteration_s)}, "
        f"by this machine's clock {spread}{more}. "
        f"1 s on the cluster is {text.significant(found.time_scale)} s here, where the runtime alone, with nothing to wait for, "
        f"takes {text.seconds(found.unpaced_s)} a step."
    )
