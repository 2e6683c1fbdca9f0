"""Timelines: the events and metrics that every engine returns, measured or predicted."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, NamedTuple

from pydantic import Field

from gpp import inline
from gpp.program.kinds import COMPUTE
from gpp.replan import Replaced


class Event(NamedTuple):
    """One interval on one device.

    `kind` is the text of an action kind (`gpp.program.kinds.KINDS`); `num_bytes` are the bytes that a transfer moved.
    """

    device: int
    kind: str
    stage: int
    microbatch: int
    start_s: float
    end_s: float
    num_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """The results of a stream of requests, predicted or measured, and the words that reports have for them.

    Args:
        buffers: messages for which an edge has room.
        arrival_rate: requests per second that came; None where another one always waited.
        requests_per_s: those answered, the first ones, which fill the pipeline, left out.
        mean_s, median_s, p95_s, p99_s: latencies: seconds from the arrival of a request, or without a rate from the begin of its
            first pass, until all its answers are there.
    """

    one: ClassVar[str] = "request"
    many: ClassVar[str] = "requests"
    made: ClassVar[str] = "answers"
    latency_words: ClassVar[str] = "from a request to its answer (median)"
    figures: ClassVar[tuple[tuple[str, str, str], ...]] = (
        ("requests", "requests_per_s", "rate"),
        ("latency, median", "median_s", "seconds"),
        ("latency, 95 %", "p95_s", "seconds"),
        ("latency, 99 %", "p99_s", "seconds"),
    )
    """Names, fields and units of the key figures."""

    buffers: int
    requests: int
    arrival_rate: float | None
    requests_per_s: float
    mean_s: float
    median_s: float
    p95_s: float
    p99_s: float

    @property
    def latency_s(self) -> float | None:
        """Seconds from a request to its answer, by which plans are told apart where requests arrive at a rate; else None."""
        return self.median_s if self.arrival_rate else None

    @property
    def tracked(self) -> dict[str, float]:
        """The numbers of a tracker's row."""
        return {"requests_per_s": self.requests_per_s, "latency_median_s": self.median_s, "latency_p99_s": self.p99_s}

    @property
    def rate(self) -> float:
        """Mini-batches in a second."""
        return self.requests_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSpread:
    """Seconds of steps that are not alike: their median and mean, and within which the share `quantile` of them ends."""

    median_s: float
    mean_s: float
    tail_s: float
    quantile: float
    steps: int

    @classmethod
    def of(cls, seconds: Sequence[float], quantile: float) -> StepSpread:
        """The spread of some steps."""
        ordered, last = sorted(seconds), len(seconds) - 1

        def at(share: float) -> float:
            low = int(share * last)
            return ordered[low] + (ordered[min(low + 1, last)] - ordered[low]) * (share * last - low)

        mean_s = sum(ordered) / len(ordered)
        return cls(median_s=at(0.5), mean_s=mean_s, tail_s=at(quantile), quantile=quantile, steps=len(ordered))


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """METRICS of the run contract, the same for predicted and measured.

    `weight_versions` are copies of a stage's weights held at a time; `staleness` is the most updates that a stage makes
    between the weights that a forward starts from and the update that applies its gradient (0 where the pipeline
    drains). `overhead_s` is measured only, and only by engines that know how long a worker waits: the runtime's own
    time for each compute action, which goes neither into computing, nor into messages, nor into waiting for them. `serving` is of a
    stream of requests only, of which `iteration_s` is the seconds of one. `spread` is known where the work differs from sample to
    sample (`gpp.cost.uneven`).
    """

    iteration_s: float
    throughput_samples_per_s: float
    bubble_fraction: float
    peak_memory_bytes: dict[int, int]
    communication_bytes: int
    max_in_flight_samples: dict[int, int]
    weight_versions: dict[int, int]
    staleness: dict[int, int] = field(default_factory=dict)
    overhead_s: float | None = None
    serving: Annotated[Serving | None, Field(exclude_if=lambda found: found is None)] = None
    spread: Annotated[StepSpread | None, Field(exclude_if=lambda found: found is None)] = None

    @property
    def course(self) -> Serving | None:
        """What a pipeline that trains nothing has shown; None for a training."""
        return self.serving

    @property
    def one(self) -> str:
        """What takes `iteration_s`, in a word."""
        return self.course.one if self.course else "step"


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """Bytes of a stage on each of its devices, as its bill has them, and what computing again costs.

    Args:
        static_bytes: weights with their copies, gradients, optimizer's state, rows of the user's inputs.
        microbatch_bytes: of each micro-batch from its forward to its backward, or to the first part of it.
        late_bytes: of each micro-batch between the parts of its backward, where it has some.
        moved_bytes: of each micro-batch, from its forward until they are on the host, and from their fetch to the backward.
        transient_bytes: while a pass runs.
        again_s: seconds of each backward in which forwards are computed again.
    """

    static_bytes: float
    microbatch_bytes: float
    moved_bytes: float
    transient_bytes: float
    late_bytes: float = 0.0
    again_s: float = 0.0


ENDLESS = Metrics(
    iteration_s=math.inf,
    throughput_samples_per_s=0.0,
    bubble_fraction=1.0,
    peak_memory_bytes={},
    communication_bytes=0,
    max_in_flight_samples={},
    weight_versions={},
)
"""Of a plan that never runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Events of one training step (zero = its start) and the metrics that they add up to.

    Args:
        steps: mini-batches whose time the events fill; above 1 for a continuous pipeline, seen in its steady state. The
            metrics are those of one mini-batch.
        memory: what each stage holds; empty where nobody has reckoned it.
    """

    source: str
    metrics: Metrics
    events: tuple[Event, ...] = ()
    steps: int = 1
    memory: tuple[StageMemory, ...] = ()

    @property
    def length_s(self) -> float:
        """Seconds that the events fill."""
        return self.metrics.iteration_s * self.steps

    def _repr_html_(self) -> str:
        """The work of every device as bars, for notebooks: forwards light, the rest of a stage's passes darker."""
        work = [event for event in self.events if event.kind in COMPUTE]
        rows = []
        for device in sorted({event.device for event in work}):
            own = (event for event in work if event.device == device)
            bars = [(e.start_s, e.end_s, e.stage, 0.45 if e.kind == "F" else 0.9, _touched(e)) for e in own]
            rows.append((f"d{device}", bars))
        length, idle = max((e.end_s for e in work), default=0.0), self.metrics.bubble_fraction
        title = f"{self.source}: a step takes {self.metrics.iteration_s * 1e3:.4g} ms, devices are idle for {idle:.0%} of it"
        return inline.bars(rows, length, title)


def _touched(event: Event) -> str:
    """What an event is, for whoever points at its bar."""
    took = (event.end_s - event.start_s) * 1e3
    return f"s{event.stage} {event.kind}{event.microbatch}: {took:.4g} ms from {event.start_s * 1e3:.4g} ms"


@dataclass(frozen=True, slots=True, kw_only=True)
class Emulation:
    """The measurements of an emulated step.

    Args:
        time_scale: seconds of this machine for one second of the cluster described.
        virtual_iteration_s: a step by the clock that the messages carried: exact, without overhead.
        unpaced_s: seconds that a step took here without waiting for any clock: the runtime's own work.
        step_s: each paced step, in seconds of the cluster.
        serving: of a stream of requests, what it has shown by that clock.
    """

    time_scale: float
    virtual_iteration_s: float
    unpaced_s: float
    step_s: tuple[float, ...]
    serving: Annotated[Serving | None, Field(exclude_if=lambda found: found is None)] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Versions:
    """Versions and staleness of the weights of each stage, from an engine without a timeline; as in `Metrics`.

    Args:
        weight_versions: copies that the stage of the pipeline would hold, by its policy.
        staleness: most updates, counted over the micro-batches.
    """

    weight_versions: dict[int, int]
    staleness: dict[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Measurements of an engine; None or empty for an engine that only simulates.

    Args:
        losses: the loss of every step.
        terms: `loss:NAME` -> its value in every step, for a loss of several terms.
        evaluations: one {"step": steps done, name: value} for each evaluation.
        emulation: the pace of emulated devices.
        versions: weight versions that an engine without a timeline counted.
        replaced: plans that were replaced while they ran; `measured` is of the last one.
        answers: of a stream of requests, the samples that it was asked for, and how many were `answered`.
    """

    measured: Timeline | None = None
    losses: tuple[float, ...] = ()
    terms: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    evaluations: tuple[dict[str, Any], ...] = ()
    emulation: Emulation | None = None
    versions: Versions | None = None
    replaced: tuple[Replaced, ...] = ()
    answers: Mapping[str, int] | None = None


def bubble_fraction(events: tuple[Event, ...], devices: list[int], iteration_s: float) -> float:
    """The share of device time in a step that is not computing: 1 - busy / (devices * step)."""
    if not devices or iteration_s <= 0:
        return 0.0
    wanted = set(devices)
    busy = sum(e.end_s - e.start_s for e in events if e.kind in COMPUTE and e.device in wanted)
    return max(0.0, 1.0 - busy / (len(devices) * iteration_s))
