"""The key figures of a run, the same for the page and the terminal."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from gpp.program.kinds import BACKWARD, COMPUTE, FORWARD, KINDS
from gpp.report import text
from gpp.report.record import RunRecord
from gpp.timeline import Metrics, Timeline

WORTH_SAYING = 0.03
"""Share by which an emulated step is longer than its virtual time, from which on the user is told what helps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
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


def peak_memory(metrics: Metrics | None) -> float | None:
    """Bytes on the fullest device."""
    return None if metrics is None else max(metrics.peak_memory_bytes.values(), default=None)


def key_figures(predicted: Metrics | None, measured: Metrics | None) -> tuple[Figure, ...]:
    """Iteration time, throughput, bubble, peak memory and communication."""

    def of(name: str, metrics: Metrics | None) -> float | None:
        return None if metrics is None else getattr(metrics, name)

    def figure(name: str, attribute: str, unit: str) -> Figure:
        return Figure(name=name, predicted=of(attribute, predicted), measured=of(attribute, measured), unit=unit)

    return (
        figure("iteration time", "iteration_s", "seconds"),
        figure("throughput, samples", "throughput_samples_per_s", "rate"),
        figure("bubble", "bubble_fraction", "percent"),
        Figure(name="peak memory", predicted=peak_memory(predicted), measured=peak_memory(measured), unit="bytes"),
        figure("communication per step", "communication_bytes", "bytes"),
    )


def run_figures(run: RunRecord) -> tuple[Figure, ...]:
    """The key figures of a run."""
    return key_figures(run.predicted.metrics if run.predicted else None, run.measured.metrics if run.measured else None)


def emulation_words(run: RunRecord) -> str:
    """How the measured step of an emulated run came about, as a sentence; empty for others."""
    found = run.emulation
    if found is None:
        return ""
    spread = " to ".join(dict.fromkeys(text.seconds(f(found.step_s)) for f in (min, max)))
    longer = (text.quotient(run.measured.metrics.iteration_s if run.measured else None, found.virtual_iteration_s) or 1.0) - 1.0
    more = f", {text.percent(longer)} longer than that: a larger engine.budget_s makes it less" if longer > WORTH_SAYING else ""
    return (
        f"Emulated: by the virtual clock a step takes {text.seconds(found.virtual_iteration_s)}; measured {spread}{more}. "
        f"1 s on the cluster is {text.significant(found.time_scale)} s here, where the runtime alone, with nothing to wait for, "
        f"takes {text.seconds(found.unpaced_s)} a step."
    )


def pass_seconds(timeline: Timeline | None) -> dict[tuple[int, str], float]:
    """Mean seconds of one forward and one whole backward of a micro-batch, by stage and direction; a backward may be split."""
    total: dict[tuple[int, str], float] = defaultdict(float)
    count: dict[tuple[int, str], int] = defaultdict(int)
    for event in timeline.events if timeline else ():
        if event.kind in COMPUTE:
            row = KINDS[event.kind]
            key = (event.stage, FORWARD if row.direction == FORWARD else BACKWARD)
            total[key] += event.end_s - event.start_s
            count[key] += row.holds or row.returns
    return {key: total[key] / count[key] for key in total if count[key]}


def stage_memory(run: RunRecord, stage: int, timeline: Timeline | None) -> tuple[float | None, float | None]:
    """Peak bytes on the fullest device of a stage, and the limit of its smallest device."""
    if run.plan is None:
        return None, None
    devices = run.plan.stages[stage].devices
    peaks = [timeline.metrics.peak_memory_bytes[d] for d in devices if d in timeline.metrics.peak_memory_bytes] if timeline else []
    limits = [run.cluster.devices[d].memory_bytes for d in devices if d < run.cluster.num_devices] if run.cluster else []
    return max(peaks, default=None), min(limits, default=None)
