"""Discrete-event run of a stream of requests on a cost model: throughput, latency, and events of the steady state.

The rules are those of `gpp.program.stream`. The order of the passes is static, so all times follow from those before: a request is
one walk over its passes. At saturation requests follow each other until each repeats the one before, which is the period.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, final

from gpp.cost.arrivals import Arrivals
from gpp.cost.problem import Problem
from gpp.plan.plan import Plan
from gpp.program.held import device_peaks
from gpp.program.kinds import FORWARD, PASS, SEND
from gpp.program.program import Program
from gpp.program.stream import Served, passes_of
from gpp.simulate.messages import message_rates
from gpp.timeline import ENDLESS, Event, Metrics, Serving, StageMemory, Timeline

LONGEST = 512
"""Requests after which the pace is the mean of the second half, if they have not come to repeat each other."""

SAME = 1e-9
"""Share of a period by which rounding may move an event."""

Objective = Literal["throughput", "latency"]
"""What planners minimise: seconds of a request at saturation, or its latency."""

SHOWN = 3
"""Requests whose time the timeline shows."""


@dataclass(slots=True)
class _Send:
    """A message that a pass sends in every request."""

    channel: int
    reader: int
    occupied_s: float
    latency_s: float
    num_bytes: float


@dataclass(slots=True)
class _Pass:
    """A pass of every request, its devices and channels by number.

    Args:
        after_s: for which the device is busy behind it: its share of what a request costs the runtime, with the last pass.
    """

    own: Served
    device: int
    seconds: float
    after_s: float
    reads: list[int]
    sends: list[_Send]
    source: bool


@final
class Stream:
    """A simulated stream of requests, one after the other.

    Args:
        slower: factor on the seconds of every pass.

    `begins` are when the passes of the last request began, in the order of `passes`; `count` are the micro-batches of one.
    """

    def __init__(self, program: Program, plan: Plan, problem: Problem, *, slower: float = 1.0) -> None:
        assert problem.regime.buffers is not None, "the problem is one of serving"
        self.buffers = problem.regime.buffers
        self.passes, self.num_channels = _made(program, plan, problem, slower)
        self.count = 1 + max(one.own.microbatch for one in self.passes)
        devices = max(one.device for one in self.passes) + 1
        self._free = [0.0] * devices
        self._channel_free = [0.0] * self.num_channels
        self._arrived = [0.0] * self.num_channels
        # Of the last passes of each device: when they began, and when what they made had left.
        self._taken = [deque([0.0] * self.buffers, maxlen=self.buffers) for _ in range(devices)]
        self._left = [deque([0.0] * (self.buffers + 1), maxlen=self.buffers + 1) for _ in range(devices)]
        self.begins: list[float] = []
        self.events: list[Event] | None = None

    def request(self, arrival_s: float, number: int = 0) -> tuple[float, float]:
        """Run one more request; returns when its first pass began and when its last one ended.

        Args:
            arrival_s: when it comes.
            number: the request's number, for events.
        """
        free, arrived, taken, left, begins = self._free, self._arrived, self._taken, self._left, list[float]()
        for one in self.passes:
            device = one.device
            now = max(free[device], left[device][0])
            for channel in one.reads:
                now = max(now, arrived[channel])
            if one.source:
                now = max(now, arrival_s)
            taken[device].append(now)
            begins.append(now)
            gone = end = now + one.seconds
            free[device] = end + one.after_s
            for send in one.sends:
                start = max(end, self._channel_free[send.channel], taken[send.reader][0])
                over = self._channel_free[send.channel] = start + send.occupied_s
                arrived[send.channel] = over + send.latency_s
                gone = max(gone, over)
                if self.events is not None:
                    self._note(one, send, number, start, over + send.latency_s)
            left[device].append(gone)
            if self.events is not None:
                own = one.own
                self.events.append(Event(own.device, PASS[FORWARD], own.stage, self._microbatch(own, number), now, end))
        self.begins = begins
        return min(begins), max(begin + one.seconds for begin, one in zip(begins, self.passes, strict=True))

    def _note(self, one: _Pass, send: _Send, number: int, start: float, end: float) -> None:
        assert self.events is not None
        own = one.own
        self.events.append(
            Event(own.device, SEND[FORWARD], own.stage, self._microbatch(own, number), start, end, round(send.num_bytes))
        )

    def _microbatch(self, own: Served, number: int) -> int:
        return own.microbatch + number * self.count


def _made(program: Program, plan: Plan, problem: Problem, slower: float) -> tuple[list[_Pass], int]:
    """The passes of a request with their seconds, and the number of channels."""
    bills, rates = plan.bills(problem), message_rates(plan, problem.graph)
    served = passes_of(program, plan)
    number = {device: i for i, device in enumerate(sorted(program.actions))}
    channels: dict[tuple[int, int, int, int], int] = {}
    waiting: dict[tuple[int, int], list[int]] = {}
    for device, actions in program.actions.items():
        for action in actions:
            if action.peer_stage >= 0 and action.kind not in SEND.values():
                key = action.peer_stage, action.stage, action.peer_device, device
                waiting.setdefault((device, action.microbatch), []).append(channels.setdefault(key, len(channels)))
    last = {own.device: own.microbatch for own in served}
    sources = {s for s, before in enumerate(plan.predecessors) if not before}
    out = []
    for own in served:
        sends = []
        for sent in own.sends:
            per_sample, fixed = rates[FORWARD, sent.stage, sent.peer_stage]
            size, link = per_sample * sent.samples + fixed, problem.cluster.link(sent.device, sent.peer_device)
            channel = channels[sent.stage, sent.peer_stage, sent.device, sent.peer_device]
            sends.append(_Send(channel, number[sent.peer_device], size / link.bandwidth_bytes_per_s, link.latency_s, size))
        out.append(
            _Pass(
                own,
                number[own.device],
                bills[own.stage].forward_s * slower,
                bills[own.stage].update_s * slower if own.microbatch == last[own.device] else 0.0,
                waiting.get((own.device, own.microbatch), []),
                sends,
                own.stage in sources,
            )
        )
    return out, len(channels)


def period_s(stream: Stream) -> float:
    """Seconds of a request at saturation: requests go through until each is like the one before, only later."""
    enough, alike, ends = 1 + -(-(stream.buffers + 1) // stream.count), 0, list[float]()
    before: Sequence[float] = ()
    for _ in range(LONGEST):
        ends.append(stream.request(0.0)[1])
        moved = [now - then for now, then in zip(stream.begins, before, strict=False)]
        alike = alike + 1 if moved and max(moved) - min(moved) <= SAME * max(moved) else 0
        if alike >= enough:
            return max(moved)
        before = stream.begins
    half = LONGEST // 2
    return (ends[-1] - ends[half - 1]) / (LONGEST - half)


def _slower(program: Program, plan: Plan, problem: Problem) -> float:
    """The factor by which passes take longer, where devices share processors in equal parts."""
    cores = problem.cluster.processors
    if cores is None or not problem.cluster.crowded(plan.num_devices):
        return 1.0
    stream = Stream(program, plan, problem)
    busy = sum(one.seconds for one in stream.passes) / period_s(stream)
    return max(1.0, busy / cores)


def serving_of(came: Sequence[float], ended: Sequence[float], arrivals: Arrivals, buffers: int) -> Serving:
    """Throughput and latencies of requests, measured or predicted.

    Args:
        came: when each arrived; at saturation, when its first pass began.
        ended: when the last of its answers was there.
    """
    latencies = sorted(end - begin for begin, end in zip(came, ended, strict=True))
    # Filling the pipeline is none of the pace.
    first = min(len(ended) // 4, 16)
    counted = len(ended) - 1 - first
    pace = (ended[-1] - ended[first]) / counted if counted > 0 else ended[-1] - came[0]
    return Serving(
        buffers=buffers,
        requests=len(ended),
        arrival_rate=arrivals.rate,
        requests_per_s=1.0 / pace if pace > 0 else 0.0,
        mean_s=sum(latencies) / len(latencies),
        median_s=_quantile(latencies, 0.5),
        p95_s=_quantile(latencies, 0.95),
        p99_s=_quantile(latencies, 0.99),
    )


def _quantile(ordered: Sequence[float], share: float) -> float:
    """A quantile, interpolated between the two nearest values."""
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def scored(program: Program, plan: Plan, problem: Problem, objective: Objective) -> Timeline:
    """The metrics of a candidate alone; `iteration_s` is what the planner minimises, throughput is what follows from it.

    Of `throughput` that is the seconds of a request at saturation, of `latency` the mean of the requests at the arrival rate, or of
    one alone where there is no rate.
    """
    arrivals = problem.regime.arrivals
    if objective == "latency":
        seconds = _answered(program, plan, problem, arrivals if arrivals.rate else replace(arrivals, requests=1)).mean_s
    else:
        seconds = period_s(Stream(program, plan, problem, slower=_slower(program, plan, problem)))
    memory = {device: round(need) for device, need in device_peaks(program, plan.bills(problem)).items()}
    metrics = replace(
        ENDLESS,
        iteration_s=seconds,
        throughput_samples_per_s=plan.minibatch_size / seconds if seconds else 0.0,
        bubble_fraction=0.0,
        peak_memory_bytes=memory,
    )
    return Timeline(source="predicted", metrics=metrics)


def questions(posed: Problem, objective: Objective, ahead: int) -> list[Problem]:
    """The problems for a planner. For throughput, `ahead` requests for each device are one mini-batch: filling hardly counts."""
    if objective == "latency":
        return [posed]
    count = ahead * posed.cluster.num_devices
    regime = replace(posed.regime, minibatches=count)
    return [replace(posed, minibatch_size=posed.minibatch_size * count, regime=regime)]


def _answered(program: Program, plan: Plan, problem: Problem, arrivals: Arrivals) -> Serving:
    stream = Stream(program, plan, problem, slower=_slower(program, plan, problem))
    came, ended = list[float](), list[float]()
    for at in arrivals.times_s():
        begun, end = stream.request(at)
        came.append(at if arrivals.rate else begun)
        ended.append(end)
    return serving_of(came, ended, arrivals, stream.buffers)


def _shown(stream: Stream, times_s: Sequence[float], iteration_s: float) -> list[Event]:
    """Events of `SHOWN` periods, of a stream at its pace or of one that has not begun."""
    # Of requests that are already on their way nothing was noted: where the last stage goes on with the next one, all have been.
    begin, stream.events = (max(stream.begins) + iteration_s if stream.begins else 0.0), []
    low, high, number = begin - SAME * iteration_s, begin + (SHOWN - SAME) * iteration_s, 0
    while number == 0 or min(stream.begins) < high:
        stream.request(times_s[min(number, len(times_s) - 1)], number)
        number += 1
    return [e._replace(start_s=e.start_s - begin, end_s=e.end_s - begin) for e in stream.events if low <= e.start_s < high]


def serve(program: Program, plan: Plan, problem: Problem, *, record: bool = True) -> Timeline:
    """The timeline of a stream of requests; `iteration_s` is the seconds of a request at saturation, or at the arrival rate.

    Args:
        program: the program of one request.
        record: keep the events of some requests in the steady state.
    """
    arrivals, slower = problem.regime.arrivals, _slower(program, plan, problem)
    stream = Stream(program, plan, problem, slower=slower)
    iteration_s = period_s(stream)
    serving = _answered(program, plan, problem, arrivals)
    if arrivals.rate:
        # From an idle pipeline on, as the stream begins.
        iteration_s, stream = 1.0 / serving.requests_per_s, Stream(program, plan, problem, slower=slower)
    events = _shown(stream, arrivals.times_s(), iteration_s) if record else []
    beside = plan.beside_s(problem)
    busy = sum(one.seconds - beside[one.own.stage][0] for one in stream.passes)
    bills = plan.bills(problem)
    metrics = Metrics(
        iteration_s=iteration_s,
        throughput_samples_per_s=plan.minibatch_size / iteration_s if iteration_s else 0.0,
        bubble_fraction=max(0.0, 1.0 - busy / (plan.num_devices * iteration_s)) if iteration_s else 0.0,
        peak_memory_bytes={device: round(need) for device, need in device_peaks(program, bills).items()},
        communication_bytes=round(sum(send.num_bytes for one in stream.passes for send in one.sends)),
        max_in_flight_samples={s: stage.microbatch_size * stage.round_robin_degree for s, stage in enumerate(plan.stages)},
        weight_versions=dict.fromkeys(range(len(plan.stages)), 1),
        serving=serving,
    )
    memory = tuple(
        StageMemory(static_bytes=b.static_bytes, microbatch_bytes=0.0, moved_bytes=0.0, transient_bytes=b.transient_bytes)
        for b in bills
    )
    return Timeline(source="predicted", metrics=metrics, events=tuple(events), steps=SHOWN, memory=memory if record else ())
